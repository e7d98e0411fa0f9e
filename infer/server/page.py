"""The page at `/`: one static file, which may load nothing and speak to nobody but this server."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import HTMLResponse


def add_page(app: FastAPI) -> None:
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    allowed = "; ".join(f"{kind}-src {_hash(html, kind)}" for kind in ("script", "style"))
    policy = f"default-src 'none'; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'; {allowed}"
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)


def _hash(html: str, tag: str) -> str:
    """Of what stands in the page itself: no other script or style may run, whatever a model writes."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
