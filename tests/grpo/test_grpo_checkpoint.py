"""Checkpoints of examples/grpo: which are taken, and as what."""

from pathlib import Path
from typing import Any

import pytest

from examples.grpo.policy import Policy
from examples.grpo.settings import Settings


@pytest.mark.parametrize("changed", [{"rank": 4}, {"alpha": 8.0}, {"target_modules": r".*\.to_q"}])
def test_a_checkpoint_of_another_adapter_is_refused_by_name(changed: dict[str, Any], tmp_path: Path) -> None:
    Policy(Settings()).save(tmp_path / "checkpoint.pt")
    (name,) = changed
    with pytest.raises(ValueError, match=f"{name} must be the checkpoint's"):
        Policy(Settings(**changed)).restore(tmp_path / "checkpoint.pt")


def test_a_run_that_has_learned_enough_is_not_resumed(tmp_path: Path) -> None:
    policy = Policy(Settings())
    policy.updates = 50
    policy.save(tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="iterations must be above the checkpoint's 50, got 50"):
        Policy(Settings()).restore(tmp_path / "checkpoint.pt")


def test_a_resumed_run_has_the_learning_rate_that_it_asks_for(tmp_path: Path) -> None:
    Policy(Settings()).save(tmp_path / "checkpoint.pt")
    slower = Policy(Settings(learning_rate=1e-5))
    slower.restore(tmp_path / "checkpoint.pt")
    assert [group["lr"] for group in slower.optimizer.param_groups] == [1e-5]
