"""The gate's snapshot under a storm: 2,000 nodes ask one `rsup serve`, each with a token and a connection of its own.

Everything is on 127.0.0.1. First every node fetches the whole snapshot, then each asks again with its ETag and is told that
nothing is new (304). The goal is of DESIGN.md's storm: 2,000 conditional fetches within 60 s.
`python -m tests.bench.bench_snapshot [NODES]`
"""

import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from rsup.supervisor import node_tokens
from tests.bench.table import RSUP, Row, Workplace

NODES = 2000
AT_ONCE = 32
START_WITHIN_S = 30.0


def main(nodes: int = NODES) -> list[Row]:
    """Rows in milliseconds a fetch, and how long all took together."""
    with Workplace() as place:
        state = place.folder / "state"
        state.mkdir(mode=0o700)
        secret = node_tokens.make_secret(state)
        tokens = [node_tokens.node_token(secret, f"n{index}") for index in range(nodes)]
        process = place.start([*RSUP, "serve", "--listen", "127.0.0.1:0", "--drains", "off"])
        try:
            host, etag = _until_served(place, tokens[0])
            whole_ms, whole_s = _storm(host, tokens, "", 200)
            new_ms, new_s = _storm(host, tokens, etag, 304)
        finally:
            place.kill(process)
    note = f"{AT_ONCE} at once"
    return [
        Row("snapshot fetched", "rsup", whole_ms, "ms", "", note),
        Row("snapshot asked for again (304)", "rsup", new_ms, "ms", "", note),
        Row(f"{nodes} nodes fetch it", "rsup", [whole_s], "s"),
        Row(f"{nodes} nodes ask again", "rsup", [new_s], "s", "<= 60 s"),
    ]


def _storm(host: str, tokens: list[str], etag: str, status: int) -> tuple[list[float], float]:
    def ask(token: str) -> float:
        began_s = time.perf_counter()
        found, _ = _fetch(host, token, etag)
        assert found == status, found
        return (time.perf_counter() - began_s) * 1e3

    began_s = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        took_ms = list(pool.map(ask, tokens))
    return took_ms, time.perf_counter() - began_s


def _fetch(host: str, token: str, etag: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, timeout=30)
    headers = {"Authorization": f"Bearer {token}"} | ({"If-None-Match": etag} if etag else {})
    try:
        connection.request("GET", "/api/v1/gate/snapshot", headers=headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers.get("ETag") or ""
    finally:
        connection.close()


def _until_served(place: Workplace, token: str) -> tuple[str, str]:
    """Host and port, and the snapshot's ETag."""
    path = place.folder / "state" / "supervisor.json"
    deadline_s = time.monotonic() + START_WITHIN_S
    while time.monotonic() < deadline_s:
        if path.exists():
            host = urlsplit(str(json.loads(path.read_text())["rest"])).netloc
            status, etag = _fetch(host, token, "")
            if status == 200:
                return host, etag
        time.sleep(0.05)
    raise AssertionError(f"no snapshot within {START_WITHIN_S:g} s\n{place.log_tail()}")


if __name__ == "__main__":
    from tests.bench.table import print_table

    print_table(main(int(sys.argv[1]) if len(sys.argv) > 1 else NODES))
