"""In the decoder's place where no media is asked for: a process that loads no model. It imports nothing."""


class IdleDecoder:
    """Is never called."""

    def __init__(self, *_: object) -> None:
        pass

    async def __call__(self, *_: object) -> None:
        raise AssertionError("no media was asked for")
