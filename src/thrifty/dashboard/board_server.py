"""The board's server: on this machine alone, for who knows the token, and for reading only."""

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
SILENCE = 30.0
"""Seconds after which a connection on which nothing is asked is closed."""
MOST_CONNECTIONS = 64
"""At a time; a browser opens six."""
MOST_FIELDS = 8
"""Fields in the query of an address."""
FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
OURS = ("same-origin", "none")
"""Where a browser says that a request comes from: a page of the board, or the person."""
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
    """Serves a site under http://127.0.0.1:PORT/TOKEN/. Raises `UsageError` where the port is taken."""

    daemon_threads = True

    def __init__(self, site: BoardSite, token: str, port: int = 0):
        self.site, self.token = site, token
        self._room = BoundedSemaphore(MOST_CONNECTIONS)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            fix = "give another --port, or --port 0 for any that is free"
            raise UsageError(f"port {port} cannot be used: {error.strerror}", fix) from error
        self.hosts = (f"{HOST}:{self.server_port}", f"localhost:{self.server_port}")

    def server_bind(self) -> None:
        # as HTTPServer's, without asking a name server for the name of this machine
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Close a connection beyond `MOST_CONNECTIONS` at once, each of which would take a thread."""
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
        """A browser that goes away in the middle of an answer is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "thrifty", ""
    timeout = SILENCE
    server: BoardServer

    def do_GET(self) -> None:
        self._send(self._answer())

    do_HEAD = do_GET

    def _refuse_method(self) -> None:
        self.close_connection = True  # a body may follow that nobody reads
        refused = self._refused()
        self._send(
            refused or _plain(HTTPStatus.METHOD_NOT_ALLOWED, "The board is for reading only."), Allow="GET, HEAD"
        )

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse_method

    def _answer(self) -> PageResponse:
        refused = self._refused()
        if refused is not None:
            return refused
        _, path, query = self._asked()
        try:
            asked = {name: values[-1] for name, values in parse_qs(query, max_num_fields=MOST_FIELDS).items()}
        except ValueError:
            return _plain(HTTPStatus.BAD_REQUEST, f"An address has at most {MOST_FIELDS} fields.")
        try:
            return self.server.site.answer(path, asked)
        except Exception as error:  # a page that fails must not take the others with it
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR, f"This page could not be made: {type(error).__name__}.")

    def _refused(self) -> PageResponse | None:
        """403 unless the request is for this host, by no other site's page but to open the first one, and knows the
        token."""
        hosts = self.headers.get_all("Host") or []
        origins = self.headers.get_all("Origin") or []
        named = len(hosts) == 1 and hosts[0].lower() in self.server.hosts
        own = all(origin == f"http://{hosts[0].lower()}" for origin in origins) if named else False
        token, path, _ = self._asked()
        opened = not path and self.headers.get("Sec-Fetch-Dest") == "document"  # by the page that leads here
        asked_by_us = opened or self.headers.get("Sec-Fetch-Site", "none") in OURS
        known = compare_digest(token.encode(), self.server.token.encode())
        if named and own and asked_by_us and known:
            return None
        return _plain(HTTPStatus.FORBIDDEN, "Open the address that the board printed when it was started.")

    def _asked(self) -> tuple[str, str, str]:
        """The token, the path behind it, and the query; empty where the address has none, or no slash after it, on
        which the links of the pages build."""
        address, _, query = self.path.partition("?")
        token, slash, path = unquote(address).removeprefix("/").partition("/")
        return (token, path, query) if slash else ("", "", "")

    def _send(self, answer: PageResponse, **more: str) -> None:
        keeping = "private, max-age=86400" if answer.lasting else "no-store"
        headers: Mapping[str, str] = {
            "Content-Type": answer.kind,
            "Content-Length": str(len(answer.body)),
            "Cache-Control": keeping,
            "Content-Security-Policy": answer.policy,
            **HEADERS,
            **more,
        }
        self.send_response(answer.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: an address has the token in it."""


def _plain(status: HTTPStatus, text: str) -> PageResponse:
    return PageResponse(f"{text}\n".encode(), "text/plain; charset=utf-8", status, OWN_POLICY)
