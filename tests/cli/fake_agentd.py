"""A stand-in for agentd, for the tests of covey-rack: the same lock, socket and signals, and answers that never
change. It starts one child, as an agent starts its programs. With FAKE_AGENTD=die it complains and ends at once; with
FAKE_AGENTD=stubborn it ignores SIGTERM."""

import fcntl
import json
import os
import signal
import socketserver
import subprocess
import sys
import time
import tomllib
from http.server import BaseHTTPRequestHandler
from pathlib import Path


def main() -> None:
    config = tomllib.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    name, state_dir, run_dir = config["name"], Path(config["state_dir"]), Path(config["run_dir"])
    mode = os.environ.get("FAKE_AGENTD", "")
    if mode == "die":
        print("agentd: the sky is falling")
        sys.exit(3)
    lock = os.open(state_dir / "agent.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(lock, b"%d\n" % os.getpid())
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    names = [folder.name for folder in state_dir.parent.iterdir() if (folder / "agent.toml").exists()]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = {
                "/v1/hosts": [{"host": other, "state": "alive"} for other in names],
                "/v1/leader": {"leader": "gpu1"},
            }.get(self.path, {})
            text = json.dumps({"schema": 1, "host": name, "as_of_wall_s": time.time(), "data": data}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    path = run_dir / "agent.sock"
    path.unlink(missing_ok=True)
    socketserver.UnixStreamServer(str(path), Handler).serve_forever()


if __name__ == "__main__":
    main()
