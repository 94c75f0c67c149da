"""Errors as RFC 9457 problem documents: one sentence in `detail` that says what happened and what to do."""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException as StarletteHTTPException

from rsup.supervisor.case_views import AmbiguousCase, BadCaseCursor, UnknownCase
from rsup.supervisor.hardware_views import UnknownHardware
from rsup.supervisor.job_selector import AmbiguousJob, UnknownJob
from rsup.supervisor.wire import RsupError, UsageError

MEDIA_TYPE = "application/problem+json"
STATUS_OF = {UnknownJob: 404, UnknownHardware: 404, UnknownCase: 404, AmbiguousJob: 409, AmbiguousCase: 409, BadCaseCursor: 422}
WRONG_QUESTION = 422

_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "instance": {"type": "string"},
    },
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a router's `responses`: these statuses answer with a problem document."""
    return {
        status: {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": _SCHEMA}}} for status in statuses
    }


def problem(request: Request, status: int, detail: str, headers: dict[str, str] | None = None, **more: Any) -> JSONResponse:
    """The response. `more` are additional members."""
    content = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    return JSONResponse(
        {**content, "instance": request.url.path, **more}, status_code=status, media_type=MEDIA_TYPE, headers=headers
    )


def refused(status: int, detail: str) -> HTTPException:
    """To raise in a route: becomes a problem with that sentence."""
    headers = {"WWW-Authenticate": 'Bearer realm="rsup"'} if status == 401 else None
    return HTTPException(status, detail, headers=headers)


def install(app: FastAPI) -> None:
    """Make problems of all errors of `app`."""

    @app.exception_handler(StarletteHTTPException)
    def of_http(request: Request, error: StarletteHTTPException) -> JSONResponse:
        detail = str(error.detail)
        if detail == HTTPStatus(error.status_code).phrase:
            detail = _plain_detail(request, error.status_code, detail)
        return problem(request, error.status_code, detail, headers=dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    def of_validation(request: Request, error: RequestValidationError) -> JSONResponse:
        errors = [{"where": ".".join(str(part) for part in one["loc"]), "message": str(one["msg"])} for one in error.errors()]
        detail = "; ".join(f"{one['where']}: {one['message']}" for one in errors[:5])
        return problem(request, 422, detail, errors=errors[:50])

    @app.exception_handler(RsupError)
    def of_operation(request: Request, error: RsupError) -> JSONResponse:
        usual = WRONG_QUESTION if isinstance(error, UsageError) else 503
        return problem(request, STATUS_OF.get(type(error), usual), str(error))

    @app.exception_handler(SQLAlchemyError)
    def of_store(request: Request, error: SQLAlchemyError) -> JSONResponse:
        cause = getattr(error, "orig", None) or type(error).__name__
        return problem(request, 503, f"the store cannot be read now ({cause}); try again, then run `rsup db check`")

    @app.exception_handler(Exception)
    def of_defect(request: Request, error: Exception) -> JSONResponse:
        return problem(request, 500, f"a defect of rsup ({type(error).__name__}); the supervisor's log has the traceback")


def _plain_detail(request: Request, status: int, detail: str) -> str:
    if status == 404:
        return f"there is nothing at {request.url.path[:200]}; /docs lists what there is"
    if status == 405:
        return f"{request.method} is not possible at {request.url.path[:200]}; /docs lists what is"
    return detail
