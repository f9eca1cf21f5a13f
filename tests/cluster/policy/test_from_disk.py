"""The policy outlives every process: an app begins with what an earlier one left on disk."""

from learning import Learning, manifests, ratios


def test_the_first_sample_of_a_new_app_is_of_the_policy_on_disk(learning: Learning) -> None:
    left, first = learning.left, learning.first
    assert first.policy_version == left.version
    assert {(m["policy_version"], m["execution_profile"]["lora"]) for m in manifests(first)} == {
        (left.version, "live")
    }
    assert set(ratios(left.transformer, first)) == {1.0}
