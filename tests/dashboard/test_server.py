"""Access to the board: only local, with its host name and the token, and read-only."""

import http.client
import socket
import time

import pytest
from board_examples import TOKEN

from thrifty.core.errors import UsageError
from thrifty.dashboard.board_server import MOST_CONNECTIONS, BoardServer, new_token

PATHS = [f"/{TOKEN}/", f"/{TOKEN}/api/runs", f"/{TOKEN}/board.js"]


def request(server, path=PATHS[0], method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("path", PATHS)
def test_a_request_with_the_token_succeeds(serve, path):
    status, _, body = request(serve(), path)
    assert status == 200 and body


@pytest.mark.parametrize("path", PATHS)
def test_both_local_host_names_and_own_pages_are_allowed(serve, path):
    server = serve()
    for name in server.hosts:
        assert request(server, path, Host=name, Origin=f"http://{name}", Sec_Fetch_Site="same-origin")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "/x/",
        f"/{TOKEN[:-1]}/",
        f"/{TOKEN}x/",
        f"/{TOKEN.upper()}/",
        f"/{TOKEN}",
        f"/{TOKEN}?x",
        "/%00/",
        "/%C3%A4/",
        "/board.js",
    ],
)
def test_requests_without_the_token_are_refused(serve, path):
    status, _, body = request(serve(), path)
    assert status == 403 and TOKEN.encode() not in body


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:80", ""])
def test_requests_to_another_host_are_refused(serve, path, host):
    assert request(serve(), path, Host=host)[0] == 403


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:1", ""])
def test_requests_from_another_origin_are_refused(serve, path, origin):
    assert request(serve(), path, Origin=origin)[0] == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_requests_from_another_site_are_refused(serve, site):
    assert request(serve(), Sec_Fetch_Site=site)[0] == 403


def test_no_host_and_two_hosts_are_refused(serve):
    server = serve()
    for hosts in ((), (f"127.0.0.1:{server.server_port}", "evil.example")):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
            lines = [f"GET {PATHS[0]} HTTP/1.1", *(f"Host: {host}" for host in hosts), "Connection: close", "", ""]
            connection.sendall("\r\n".join(lines).encode())
            assert connection.makefile().readline().split()[1] == "403", hosts


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_write_methods_are_refused(serve, method):
    server = serve()
    status, headers, _ = request(server, method=method)
    assert status == 405 and headers["Allow"] == "GET, HEAD"
    assert request(server, method=method, Host="evil.example")[0] == 403


def test_a_head_has_the_headers_and_no_body(serve):
    status, headers, body = request(serve(), method="HEAD")
    assert status == 200 and int(headers["Content-Length"]) > 0 and body == b""


def test_every_response_has_a_strict_content_policy(serve):
    for path in [*PATHS, f"/{TOKEN}/nothing", "/"]:
        _, headers, _ = request(serve(), path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "http" not in policy
        assert "unsafe-inline" not in policy.partition("style-src")[0] and "unsafe-eval" not in policy
        assert headers["Referrer-Policy"] == "no-referrer" and headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store" and not headers["Access-Control-Allow-Origin"]


def test_the_server_listens_locally_only(serve):
    assert serve().socket.getsockname()[0] == "127.0.0.1"


def test_a_failing_page_returns_500_and_the_board_continues(serve, site, monkeypatch):
    server = serve()
    monkeypatch.setattr(site.watch, "rows", lambda: 1 / 0)
    status, _, body = request(server)
    assert status == 500 and b"ZeroDivisionError" in body and b"Traceback" not in body
    monkeypatch.undo()
    assert request(server)[0] == 200


def test_an_address_with_too_many_fields_is_a_bad_request(serve):
    status, _, body = request(serve(), f"/{TOKEN}/?" + "&".join(["a=1"] * 9000))
    assert status == 400 and b"at most" in body


def test_a_port_in_use_is_a_usage_error(serve, site):
    server = serve()
    with pytest.raises(UsageError, match=r"(?s)is not available.*port=…"):
        BoardServer(site, TOKEN, server.server_port)


def test_tokens_cannot_be_guessed():
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100 and min(map(len, tokens)) >= 32


def test_malformed_addresses_have_a_response(serve):
    server = serve()
    many = "&".join(f"a{number}=" for number in range(50))
    for path, status in (("http://[/", "403"), (f"{PATHS[0]}?{many}", "400")):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
            host = f"Host: 127.0.0.1:{server.server_port}"
            connection.sendall(f"GET {path} HTTP/1.1\r\n{host}\r\nConnection: close\r\n\r\n".encode())
            assert connection.makefile().readline().split()[1:2] == [status], path


def test_only_the_start_page_opens_from_another_page(serve):
    server = serve()
    opening = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert request(server, PATHS[0], **opening)[0] == 200
    assert [request(server, path, **opening)[0] for path in PATHS[1:]] == [403, 403]
    assert request(server, PATHS[0], **opening | {"Sec_Fetch_Dest": "iframe"})[0] == 403


def test_connections_beyond_the_limit_are_refused(serve):
    server = serve()
    connections = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(MOST_CONNECTIONS)]
    assert request(server)[0] == 503
    for connection in connections:
        connection.close()
    end = time.monotonic() + 10
    while request(server)[0] == 503:
        assert time.monotonic() < end
    assert request(server)[0] == 200
