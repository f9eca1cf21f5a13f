"""A progress bar over groups, in denoising steps, for scripts."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tqdm import tqdm

from deployments.group import RolloutGroup

REFRESH_S = 0.2


@contextmanager
def progress_bar(groups: Sequence[RolloutGroup]) -> Iterator[None]:
    """Show on stderr how many of the groups' steps are done, until the block ends."""
    samples = [sample for group in groups for sample in group.samples]
    total = sum(group.request.num_inference_steps * len(group.samples) for group in groups)
    stopping = threading.Event()
    with tqdm(total=total, unit="step", desc=f"{len(samples)} samples") as bar:

        def refresh() -> None:
            while not stopping.wait(REFRESH_S):
                show()

        def show() -> None:
            bar.n = sum(sample.steps_done for sample in samples)
            settled = sum(sample.settled.done() for sample in samples)
            bar.set_postfix_str(f"{settled}/{len(samples)} settled")

        thread = threading.Thread(target=refresh, name="progress-bar", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
            show()
