"""What a trainer tells the fleet about its policy: weights to sample from, to pause, to sleep and to wake.

All of it goes to the weight store and needs no request slot of a denoiser. Part of `RolloutClient`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.actor import ActorHandle

from deployments.weights.handle import answer, find_store
from schemas.control import Fleet, ReplicaState, RunOrder, RunState, When
from schemas.validation import validated

if TYPE_CHECKING:
    from deployments.weights.publishing import Source
    from schemas.weights import Update

ANSWER_DEADLINE_S = 60.0
PUBLISH_DEADLINE_S = 1800.0
HALT_DEADLINE_S = 1800.0
GRACE_S = 10.0
"""How much longer than its deadline the store is waited for."""


class WeightControls:
    """The policy of one app."""

    def __init__(self, app_name: str) -> None:
        self.app_name = app_name

    @property
    def weight_store(self) -> ActorHandle:
        """The app's weight store (`deployments.weights.store`)."""
        return find_store(self.app_name)

    def publish_weights(
        self,
        *,
        version: int,
        tensors: "Source | None" = None,
        path: str | Path | None = None,
        update: "Update" = "full",
        lora_config: Any = None,
        merge: bool = False,
        when: When = "between_samples",
        timeout_s: float = PUBLISH_DEADLINE_S,
    ) -> list[ReplicaState]:
        """Make other weights the policy of the whole fleet; returns each replica's state once it samples from them.

        ``tensors``: a state dict of the transformer under the checkpoint's names, or an iterator of parts of one; or
        ``path``: a safetensors file or folder that this process can read. ``update``: "full" is every tensor,
        "partial" some, "lora" an adapter, as PEFT names it, with its ``lora_config`` (a LoraConfig or its dict; beside
        an adapter's file it is found). A LoRA is applied live, with the bits of the trainer's own forward pass, or
        merged into the weights with ``merge``: faster, and some 1e-6 away. Dtypes stay what they are.

        ``when``: "between_samples" lets every sample end on the version it began with; "immediate" changes weights at
        the next step, and a sample's manifest lists the version of each step.

        Raises ValueError (a Problem) for weights that do not fit, that hold NaN or infinity, or whose version is not
        newer, and TimeoutError after ``timeout_s``, which says whether the new version is in place. In every other
        case the policy before it is in place everywhere.
        """
        from deployments.weights.publishing import publish  # with torch, which only those who publish need

        return publish(
            self.weight_store,
            version=version,
            tensors=tensors,
            path=path,
            update=update,
            lora_config=lora_config,
            merge=merge,
            when=when,
            timeout_s=timeout_s,
        )

    def policy_version(self) -> Fleet:
        """The policy's version, and every replica's version, digest and state."""
        return Fleet.model_validate(answer(self.weight_store.fleet.remote(), ANSWER_DEADLINE_S))

    def pause(
        self, *, when: When = "between_samples", timeout_s: float = HALT_DEADLINE_S
    ) -> list[ReplicaState]:
        """Let no sample start (or, "immediate", move) until ``resume``; returns once every replica stands still.

        What is submitted meanwhile waits, or fails where ``denoiser.when_halted`` says so. Twice is once. Raises
        TimeoutError after ``timeout_s``: replicas that had not come to their boundary halt there; and RuntimeError (a
        Problem) when a replica could not, which goes on trying.
        """
        return self._set_run("paused", when, timeout_s)

    def sleep(
        self, *, when: When = "between_samples", timeout_s: float = HALT_DEADLINE_S
    ) -> list[ReplicaState]:
        """As ``pause``; then weights move to host memory, and the device is free for others until ``wake``.

        Weights that are published meanwhile are in place before the first sample that begins after waking.
        """
        return self._set_run("asleep", when, timeout_s)

    def resume(self, *, timeout_s: float = HALT_DEADLINE_S) -> list[ReplicaState]:
        """End a pause or a sleep; returns once every replica samples, from the newest version. Twice is once.

        Raises as ``pause`` does; a replica that could not wake goes on trying.
        """
        return self._set_run("running", "between_samples", timeout_s)

    wake = resume

    def _set_run(self, run: RunState, when: When, timeout_s: float) -> list[ReplicaState]:
        order = validated(RunOrder, {"run": run, "when": when})
        call = self.weight_store.set_run.remote(order.run, order.when, timeout_s)
        return [ReplicaState.model_validate(state) for state in answer(call, timeout_s + GRACE_S)]
