"""A reward of one's own, by name: workers find it as "tests.rewards:of_red_balls"."""

from examples.grpo.rewards import redness
from schemas.media import MediaView


def of_red_balls(media: MediaView) -> float:
    """Raises RuntimeError for a picture of anything else."""
    prompt = media.manifest["request"]["prompt"]
    if prompt != "a red ball":
        raise RuntimeError(f"{prompt} is no red ball")
    return redness(media)
