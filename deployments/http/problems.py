"""Problems as HTTP answers: RFC 9457's problem details, whatever went wrong and whoever noticed.

A route raises a Problem's own exception, whose code gives the status, or a `Refusal` where HTTP has a status of its own
for it. FastAPI's refusals are put into the same words, and every status is described in the OpenAPI document.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from schemas.errors import Code, Problem, invalid
from schemas.problem_details import ProblemDetails
from schemas.request import RolloutRequest
from schemas.validation import problem_of_validation_error

logger = logging.getLogger("ray.serve")

PROBLEM_TYPE = "application/problem+json"
STATUS_OF_CODE: Mapping[Code, int] = {
    "invalid_request": 422,
    "weights_refused": 422,
    "not_found": 404,
    "conflict": 409,
    "gone": 410,
    "cancelled": 410,
    "queue_full": 503,
    "halted": 503,
    "checkpoint_replaced": 503,
    "replica_died": 503,
    "deadline_exceeded": 504,
}
"""HTTP status of a Problem; 500 for any other code."""
READABLE = "send JSON in UTF-8, not nested by the thousand and without numbers of thousands of digits"
RETRY_AFTER_S = 1
METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")

MEANINGS: Mapping[int, str] = {
    400: "The body cannot be read",
    401: "The token is missing or wrong",
    403: "Sent by a page of an origin that is not named",
    404: "Nothing is there",
    406: "It cannot be answered in a form that Accept names",
    408: "The body was not there in time",
    409: "The request_id is taken by another request",
    410: "Deleted, given up, or not kept any more",
    413: "The body is too long",
    416: "The range lies outside of what is there",
    422: "Cannot be sampled, or is no such request",
    500: "No sample could be made, or something went wrong",
    503: "Full or halted, or a replica died: try again",
    504: "Not done by its deadline",
}
ANYWHERE = (401, 403, 408, 413, 422, 500, 503, 504)
"""Statuses that any route under /v1 may answer with."""


class Refusal(HTTPException):
    """A Problem with a status of HTTP's own."""

    def __init__(self, status: int, problem: Problem, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, str(problem), headers)
        self.problem = problem


def missing(field: str, value: object, rule: str, remedy: str) -> Refusal:
    """404: a part of a rollout that is not there."""
    return Refusal(404, Problem(code="not_found", field=field, value=value, rule=rule, remedy=remedy))


def status_of(problem: Problem) -> int:
    """The HTTP status of a Problem."""
    return STATUS_OF_CODE.get(problem.code, 500)


def answer(
    problem: Problem, status: int | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """The answer that tells a Problem."""
    status = status or status_of(problem)
    details = ProblemDetails.of(problem, status)
    retry = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    return JSONResponse(
        details.model_dump(mode="json"),
        status_code=status,
        headers={**retry, **(headers or {})},
        media_type=PROBLEM_TYPE,
    )


def problem_of_any(error: Exception) -> Problem:
    """The Problem that an exception carries; one that carries none is a fault of ours, and is logged."""
    problem = Problem.of(error)
    if problem is None:
        logger.error("a request could not be answered", exc_info=error)
        problem = Problem(
            code="internal", rule="the request could not be answered", remedy="see the ingress's log"
        )
    return problem


def tell_problems(app: FastAPI) -> None:
    """Answer whatever ``app``'s routes raise with problem details."""

    async def tell(_: Request, error: Exception) -> JSONResponse:
        return answer(problem_of_any(error))

    async def tell_unreadable(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        problem = _not_json(error) or problem_of_validation_error(error, RolloutRequest)
        field = None if problem.field is None else problem.field.removeprefix("path.")
        return answer(replace(problem, field=field))

    async def tell_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if isinstance(error, Refusal):
            return answer(error.problem, error.status_code, error.headers)
        headers = {**(error.headers or {})}
        if error.status_code == 405:
            # Starlette names those of the first route at the path alone.
            headers["Allow"] = ", ".join(_methods_at(request))
        return answer(_of_http(request, error, headers), error.status_code, headers)

    # By kind, since what is handled for Exception itself is raised again by Starlette, into the log.
    for kind in (ValueError, LookupError, TimeoutError, RuntimeError, Exception):
        app.add_exception_handler(kind, tell)
    app.add_exception_handler(RequestValidationError, tell_unreadable)
    app.add_exception_handler(HTTPException, tell_http)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route may answer besides success, for the OpenAPI document; those of ANYWHERE with them."""
    schema = {"$ref": f"#/components/schemas/{ProblemDetails.__name__}"}
    return {
        status: {"description": MEANINGS[status], "content": {PROBLEM_TYPE: {"schema": schema}}}
        for status in sorted({*statuses, *ANYWHERE})
    }


def describe_problems(app: FastAPI) -> None:
    """Put the schema of problem details into the OpenAPI document, which `responses` refers to."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        reference = "#/components/schemas/{model}"
        schemas[ProblemDetails.__name__] = ProblemDetails.model_json_schema(ref_template=reference)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _methods_at(request: Request) -> list[str]:
    """The methods that lead somewhere at the request's path."""

    def leads(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [method for method in METHODS if leads(method)]


def _of_http(request: Request, error: HTTPException, headers: Mapping[str, str]) -> Problem:
    path, method = request.url.path, request.method
    match error.status_code:
        case 404:
            return Problem(
                code="not_found",
                field="path",
                value=path,
                rule="leads nowhere",
                remedy="/docs lists what there is",
            )
        case 405:
            return invalid(
                "method", method, f"must be one of {headers['Allow']} at {path}", "/docs lists what there is"
            )
        case status:
            reason = str(error.detail or HTTPStatus(status).phrase)
            return invalid("body", None, f"cannot be read: {reason}", READABLE)


def _not_json(error: RequestValidationError) -> Problem | None:
    """What is wrong with a body that is no JSON at all, or was not sent as such; None for any other error."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        at = first["loc"][-1]
        rule = f"must be JSON, and is not at character {at}: {first['ctx']['error']}"
        return invalid("body", error.body, rule, 'send an object such as {"prompt": "a red ball"}')
    if tuple(first["loc"]) == ("body",) and first["type"] in ("missing", "model_attributes_type"):
        remedy = 'send an object such as {"prompt": "a red ball"} with content-type application/json'
        return invalid("body", error.body, "must be a JSON object", remedy)
    return None
