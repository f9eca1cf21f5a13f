"""JSON bodies of SGLang's routes: read by hand, so that what is wrong with them is told in the caller's words and in
each route's own form of an answer, and shown in the OpenAPI document all the same."""

import json
from typing import Any

from fastapi import Request
from pydantic import BaseModel

from schemas.errors import invalid

MAX_SHOWN_BYTES = 200


async def read_json(request: Request) -> Any:
    """The request's body; an empty one is an object without keys. Raises ValueError (a Problem)."""
    body = await request.body()
    if not body.strip():
        return {}
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        shown = body[:MAX_SHOWN_BYTES].decode(errors="replace")
        remedy = "send an object with content-type application/json"
        raise invalid("body", shown, f"must be JSON: {error}", remedy).exception() from None


def body_of(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """How the OpenAPI document says that a route takes ``model`` as JSON."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": required, "content": content}}
