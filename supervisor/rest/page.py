"""The status page and its two static files, `/docs`, and signing in by `/?token=...`.

The files hold no secrets and need no token; what they show comes over the API, which does.
"""

from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, RedirectResponse

from rsup.supervisor.rest.context import Context
from rsup.supervisor.rest.guards import WRONG_TOKEN, cookie_name
from rsup.supervisor.rest.problems import refused

WEB = Path(__file__).resolve().parent.parent / "web"
STATIC = {"page.css": "text/css", "page.js": "text/javascript", "docs.js": "text/javascript"}
ONE_MONTH_S = 30 * 24 * 3600

router = APIRouter(include_in_schema=False)


@router.get("/")
def status_page(request: Request, context: Context, token: str = "") -> Response:
    """The page. With a token: keep it in a cookie that scripts cannot read, and take it out of the address."""
    if not token:
        return FileResponse(WEB / "index.html", media_type="text/html", headers={"Cache-Control": "no-cache"})
    if context.tokens.find(token) is None:
        raise refused(401, WRONG_TOKEN)
    answer = RedirectResponse("/", status_code=303)
    secure = request.url.scheme == "https"
    answer.set_cookie(cookie_name(request), token, max_age=ONE_MONTH_S, httponly=True, samesite="strict", secure=secure)
    return answer


@router.get("/docs")
def docs_page() -> Response:
    """The API's reference, made from `/openapi.json` without assets from elsewhere: clusters are often cut off."""
    return FileResponse(WEB / "docs.html", media_type="text/html", headers={"Cache-Control": "no-cache"})


@router.get("/static/{name}")
def static_file(name: str) -> Response:
    """One of the page's files."""
    if name not in STATIC:
        raise refused(404, f"there is no static file {name[:100]!r}")
    return FileResponse(WEB / name, media_type=STATIC[name], headers={"Cache-Control": "no-cache"})
