"""A remote judge: answers each question after `PLANTED_LATENCY_S` seconds, as many at a time as are asked."""

import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Judge(BaseHTTPRequestHandler):
    """Answers 0 to everything."""

    def do_POST(self) -> None:
        """Answer a question."""
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(float(os.environ["PLANTED_LATENCY_S"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"score": 0.0}')

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """A server to which many may connect at once."""

    request_queue_size = 256


if __name__ == "__main__":
    Server(("127.0.0.1", int(os.environ["PLANTED_PORT"])), Judge).serve_forever()
