"""Answers requests of a client as an inference engine would."""

import http.server
import json
import threading


class Server(http.server.ThreadingHTTPServer):
    """Answers each request with the given objects.

    Args:
        answers: the answer to a request, or the chunks of a stream.
    """

    def __init__(self, answers: list[dict]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = [{"id": "1", "created": 1, "model": "m"} | answer for answer in answers]
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request.get("stream"):
            lines = [json.dumps(answer) for answer in self.server.answers]
            body, kind = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]), "text/event-stream"
        else:
            body, kind = json.dumps(self.server.answers[0]), "application/json"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *words: object) -> None:
        pass
