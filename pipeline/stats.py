"""What an engine has done so far, in totals. Rates and exports are made of them elsewhere."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class EngineStats:
    """Totals since the engine was made. Written by its thread, read by any."""

    ticks: int = 0
    """Turns of the loop in which samples moved."""
    rows: int = 0
    """Rows of samples in all forward passes."""
    padded_rows: int = 0
    """Rows that only filled a batch up."""
    tokens: int = 0
    """Video and audio tokens of the samples' rows."""
    forward_s: float = 0.0
    """Seconds in the model's forward passes, as the step thread sees them (on a GPU: to queue them)."""
    busy_s: float = 0.0
    """Seconds in which samples moved."""
    wait_s: float = 0.0
    """Sum over the done samples of the time from submission to the first step."""
    done: int = 0
    cancelled: int = 0
    expired: int = 0
    """Out of time, or of a caller that fell silent."""
    failed: int = 0
    swaps: int = 0
    """Times that work was done at a boundary: other weights, or a halt."""
    swap_s: float = 0.0
    """Seconds that it took, in which no sample moved."""
