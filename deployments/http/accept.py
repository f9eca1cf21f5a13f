"""Which form of an answer a caller wants: the Accept header against what there is (RFC 9110, 12.5.1)."""

from collections.abc import Sequence

from fastapi import Request

from deployments.http.problems import Refusal
from schemas.errors import invalid


def chosen(request: Request, offers: Sequence[str]) -> str:
    """The offer that the caller likes best, the first of equals; a caller who says nothing takes any.

    Raises Refusal (406) when none will do.
    """
    accept = ",".join(request.headers.getlist("accept"))
    ranges = [_range(part) for part in accept.split(",") if part.strip()] or [("*/*", 1.0)]
    likings = [_liking(offer, ranges) for offer in offers]
    best = max(likings)
    if best <= 0:
        rule, remedy = f"must allow {' or '.join(offers)}", f"use {offers[0]}, or leave Accept out"
        raise Refusal(406, invalid("Accept", accept, rule, remedy))
    return offers[likings.index(best)]


def _range(part: str) -> tuple[str, float]:
    """A media range and its weight; one whose weight is no number is wanted least of all."""
    name, *parameters = (piece.strip().lower() for piece in part.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return name, min(1.0, max(0.0, float(parameter[2:])))
            except ValueError:
                return name, 0.0
    return name, 1.0


def _liking(offer: str, ranges: Sequence[tuple[str, float]]) -> float:
    """The weight of the most specific range that the offer lies in."""
    for name in (offer, f"{offer.partition('/')[0]}/*", "*/*"):
        weights = [weight for wanted, weight in ranges if wanted == name]
        if weights:
            return max(weights)
    return 0.0
