"""Server of the board. It is local and read-only, and accepts only requests with the token."""

import secrets
import socketserver
from collections.abc import Mapping
from contextlib import suppress
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore
from typing import Any
from urllib.parse import parse_qs, unquote

from thrifty.core.errors import UsageError
from thrifty.dashboard.board_site import BoardSite
from thrifty.dashboard.page_responses import OWN_POLICY, PageResponse

HOST = "127.0.0.1"
IDLE_TIMEOUT = 30.0
"""Time in seconds after which an idle connection is closed."""
MOST_CONNECTIONS = 64
"""Maximum number of simultaneous connections. A browser opens six."""
MOST_FIELDS = 8
"""Maximum number of fields in a query."""
FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
OURS = ("same-origin", "none")
"""Allowed values of Sec-Fetch-Site, for requests from a page of the board or directly from the user."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


def new_token() -> str:
    return secrets.token_urlsafe(24)


class BoardServer(ThreadingHTTPServer):
    """Server of a site at http://127.0.0.1:PORT/TOKEN/. Raises UsageError if the port is in use."""

    daemon_threads = True

    def __init__(self, site: BoardSite, token: str, port: int = 0):
        self.site, self.token = site, token
        self._room = BoundedSemaphore(MOST_CONNECTIONS)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            fix = "--port 0 for any free port; or choose another --port"
            raise UsageError(f"port {port} is not available: {error.strerror}", fix) from error
        self.hosts = (f"{HOST}:{self.server_port}", f"localhost:{self.server_port}")

    def server_bind(self) -> None:
        # as in HTTPServer, but without a DNS lookup of the host name
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Close connections beyond `MOST_CONNECTIONS` at once, because each connection uses a thread."""
        if not self._room.acquire(blocking=False):
            with suppress(OSError):
                request.sendall(FULL)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error if a browser disconnects during a response."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "thrifty", ""
    timeout = IDLE_TIMEOUT
    server: BoardServer

    def do_GET(self) -> None:
        self._send(self._respond())

    do_HEAD = do_GET

    def _refuse_method(self) -> None:
        self.close_connection = True  # an unread request body may follow
        refused = self._refused()
        self._send(refused or _plain(HTTPStatus.METHOD_NOT_ALLOWED, "The board is read-only."), Allow="GET, HEAD")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse_method

    def _respond(self) -> PageResponse:
        refused = self._refused()
        if refused is not None:
            return refused
        _, path, query = self._address_parts()
        try:
            fields = {name: values[-1] for name, values in parse_qs(query, max_num_fields=MOST_FIELDS).items()}
        except ValueError:
            return _plain(HTTPStatus.BAD_REQUEST, f"A query may have at most {MOST_FIELDS} fields.")
        try:
            return self.server.site.respond(path, fields)
        except Exception as error:  # an error in one page must not stop the server
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR, f"This page failed: {type(error).__name__}.")

    def _refused(self) -> PageResponse | None:
        """Return 403 unless host, origin and token are valid.

        The request must name this host. It must come from a page of the board or from the user. Any other page may only
        open the start page.
        """
        hosts = self.headers.get_all("Host") or []
        origins = self.headers.get_all("Origin") or []
        is_our_host = len(hosts) == 1 and hosts[0].lower() in self.server.hosts
        is_same_origin = all(origin == f"http://{hosts[0].lower()}" for origin in origins) if is_our_host else False
        token, path, _ = self._address_parts()
        opens_start_page = not path and self.headers.get("Sec-Fetch-Dest") == "document"  # a link on another page
        is_allowed_site = opens_start_page or self.headers.get("Sec-Fetch-Site", "none") in OURS
        has_token = compare_digest(token.encode(), self.server.token.encode())
        if is_our_host and is_same_origin and is_allowed_site and has_token:
            return None
        return _plain(HTTPStatus.FORBIDDEN, "Open the address that the board printed when it started.")

    def _address_parts(self) -> tuple[str, str, str]:
        """Return the token, path and query of the address.

        All are empty if there is no token, or no slash after the token. The slash is required because links of pages
        are relative.
        """
        address, _, query = self.path.partition("?")
        token, slash, path = unquote(address).removeprefix("/").partition("/")
        return (token, path, query) if slash else ("", "", "")

    def _send(self, response: PageResponse, **more: str) -> None:
        caching = "private, max-age=86400" if response.lasting else "no-store"
        headers: Mapping[str, str] = {
            "Content-Type": response.kind,
            "Content-Length": str(len(response.body)),
            "Cache-Control": caching,
            "Content-Security-Policy": response.policy,
            **HEADERS,
            **more,
        }
        self.send_response(response.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because the address contains the token."""


def _plain(status: HTTPStatus, text: str) -> PageResponse:
    return PageResponse(f"{text}\n".encode(), "text/plain; charset=utf-8", status, OWN_POLICY)
