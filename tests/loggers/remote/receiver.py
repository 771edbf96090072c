"""A server of this machine that keeps what is posted to it, and answers which steps of a run it has."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """What has been posted, and where to post it."""

    def __init__(self) -> None:
        self.posts: list[dict[str, Any]] = []
        self.status = 200
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if receiver.status == 200:
                    receiver.posts.append(body)
                self.send_response(receiver.status)
                self.end_headers()

            def do_GET(self) -> None:
                run = self.path.partition("?run=")[2]
                posts = [post for post in receiver.posts if post.get("run") == run and "step" in post]
                last = {name: post["step"] for post in sorted(posts, key=lambda post: post["step"]) for name in post}
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(last).encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/secret-of-the-hook"

    def steps(self, name: str) -> list[int]:
        return [post["step"] for post in self.posts if name in post]

    def texts(self) -> list[str]:
        return [post["text"] for post in self.posts if "text" in post]


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Receive posts until the end of the block."""
    receiving = Receiver()
    thread = threading.Thread(target=receiving.server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield receiving
    finally:
        receiving.server.shutdown()
        thread.join()
        receiving.server.server_close()
