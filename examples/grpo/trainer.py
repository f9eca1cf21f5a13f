"""The trainer: it samples groups, has them scored, lets the policy learn from them, publishes it, and so on.

    submit ─► collect ─► learn ─► publish                       strictly on policy
    submit ─► collect ─► submit the next ─► learn ─► publish    one step off: sampling and learning at once

It runs the graph itself, through RolloutClient, and so owns every trajectory. Media go to reward workers only. Of which
version a group is, its manifests say; nothing else is believed.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from deployments.client import RolloutClient
from deployments.group import RolloutGroup
from pipeline.conditioning import read
from pipeline.export import save_mp4
from pipeline.noise import MODALITIES
from schemas.trajectory import TrajectoryView, read_trajectory

from .checks import check_app
from .loss import advantages, shuffled
from .policy import Policy, Row
from .rewards import RewardWorker
from .settings import Settings

logger = logging.getLogger(__name__)


class Trainer:
    """Make a Ray actor of it: `ray.remote(Trainer).remote(settings, folder)`. One trainer per app."""

    def __init__(self, settings: Settings, folder: str, app: str = "default", resume: bool = False) -> None:
        """folder: where checkpoints and clips are kept. resume: go on from the checkpoint that is there.

        Raises ValueError, before anything is sampled, for settings that do not fit the app or the checkpoint.
        """
        self.settings, self.folder = settings, Path(folder)
        self.client = RolloutClient.connect(app)
        try:
            check_app(settings, self.client.card)
            self.policy = Policy(settings)
            rewards = {"video": settings.video_reward, "audio": settings.audio_reward}
            make_worker = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=2)(RewardWorker).remote
            self.reward_workers = cycle([make_worker(rewards) for _ in range(settings.reward_workers)])
            self.updates_of: dict[int, int] = {}
            """How many updates each version that was published has learned from."""
            if resume:
                self.policy.restore(self.folder / "checkpoint.pt")
            self.publish()  # a new adapter too: rollouts then have the trainer's execution profile from the first
        except BaseException:
            self.client.close()
            raise

    def run(self) -> Iterator[Row]:
        """Learn until `settings.iterations` updates are done; a row of numbers for each."""
        settings, policy = self.settings, self.policy
        saved = policy.updates
        pending = self.submit(policy.updates)
        try:
            while policy.updates < settings.iterations:
                is_last = policy.updates + 1 == settings.iterations
                started = time.monotonic()
                groups, rewards = self.collect(pending)
                collected = time.monotonic()
                if not (settings.on_policy or is_last):
                    pending = self.submit(policy.updates + 1)
                row = self.learn(groups, rewards)
                learned = time.monotonic()
                self.publish()
                if settings.on_policy and not is_last:
                    pending = self.submit(policy.updates)
                if is_last or policy.updates % settings.checkpoint_every == 0:
                    policy.save(self.folder / "checkpoint.pt")
                    saved = policy.updates
                row |= {"wait_s": collected - started, "learn_s": learned - collected}
                yield row | {"iteration": policy.updates, "publish_s": time.monotonic() - learned}
        finally:  # what the fleet has taken is sound, and worth more than the last checkpoint
            if saved < policy.updates == self.updates_of[max(self.updates_of)]:
                policy.save(self.folder / "checkpoint.pt")

    def submit(self, iteration: int) -> list[RolloutGroup]:
        """Start an iteration's groups; returns at once."""
        settings, count = self.settings, self.settings.groups_per_iteration
        return [
            self._submit(
                prompt=settings.prompts[number % len(settings.prompts)],
                num_samples=settings.group_size,
                seed=settings.seed * 1_000_000 + number,
            )
            for number in range(iteration * count, (iteration + 1) * count)
        ]

    def collect(self, groups: Sequence[RolloutGroup]) -> tuple[list[RolloutGroup], dict[str, Tensor]]:
        """Wait for groups and rewards, [groups, samples] per modality. Groups with a sample that failed, or whose reward
        did, are left out; when all are, the last failure is raised."""
        scores = {
            sample: next(self.reward_workers).score.remote(sample.media)
            for sample in self.client.as_completed(groups)
            if sample.done
        }
        whole, found = [], []
        for group in groups:
            try:
                group.raise_if_failed()
                found.append(ray.get([scores[sample] for sample in group.samples]))
                whole.append(group)
            except Exception as error:
                logger.warning("a group is left out: %s", error)
                if group is groups[-1] and not whole:
                    raise
        return whole, {
            m: torch.tensor([[score[m] for score in group] for group in found]) for m in MODALITIES
        }

    def learn(self, groups: Sequence[RolloutGroup], rewards: dict[str, Tensor]) -> Row:
        """Learn from the groups that are not too old."""
        settings = self.settings
        views = [
            [read_trajectory(ray.get(sample.trajectory)) for sample in group.samples] for group in groups
        ]
        staleness = [max(map(self.staleness, samples)) for samples in views]
        bound = 0 if settings.on_policy else settings.max_staleness
        kept = [index for index, updates in enumerate(staleness) if updates <= bound]
        if not kept:
            raise RuntimeError(f"all groups are {min(staleness)} updates old or more, {bound} are allowed")
        row: Row = {
            "staleness": max(staleness),
            "left_out": settings.groups_per_iteration - len(kept),
        }
        found: dict[str, list[float]] = {}
        for m in MODALITIES:
            row |= {f"reward_{m}": float(rewards[m].mean()), f"spread_{m}": float(rewards[m].std())}
            of_groups = advantages(rewards[m][kept])
            if settings.shuffle_advantages:
                key = 2 * (settings.seed * 1_000_000 + self.policy.updates) + MODALITIES.index(m)
                of_groups = shuffled(of_groups, torch.Generator().manual_seed(key))
            found[m] = of_groups.flatten().tolist()
        device = self.policy.transformer.device
        conditionings = [read(ray.get(groups[index].conditioning), device) for index in kept]
        samples = [view for index in kept for view in views[index]]
        return row | self.policy.learn(samples, conditionings, found, [*map(self.staleness, samples)])

    def staleness(self, view: TrajectoryView) -> int:
        """Updates since the weights that a sample was made with."""
        version = view.manifest["policy_version"]
        if version not in self.updates_of:
            raise RuntimeError(f"a sample is of version {version}, which this trainer did not publish")
        return self.policy.updates - self.updates_of[version]

    def publish(self) -> None:
        """Make the adapter the policy of the fleet, under the next free version."""
        version = self.client.policy_version().control.version + 1
        self.client.publish_weights(
            version=version, tensors=self.policy.adapter(), update="lora", lora_config=self.policy.lora
        )
        self.updates_of[version] = self.policy.updates

    def clips(self, name: str, num_samples: int = 2) -> None:
        """Save what the newest weights make of noise that is always the same."""
        group = self._submit(
            prompt=self.settings.prompts[0], num_samples=num_samples, seed=self.settings.seed
        )
        for sample in self.client.as_completed([group]):
            sample.raise_if_failed()
            save_mp4(ray.get(sample.media), self.folder / f"{name}-{sample.sample_index}.mp4")

    def _submit(self, **request: Any) -> RolloutGroup:
        newest = {"min_policy_version": max(self.updates_of)}
        return self.client.submit({**self.settings.request, **request, **newest})
