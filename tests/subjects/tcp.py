# SPDX-License-Identifier: Apache-2.0
"""A connection to a server outside: tcp.py --server HOST:PORT. Sends a line per step, reads the echo, connects again when it broke.

tcp.py --listen PORT is that server (echoes lines; prints each connection).
"""

import socket
import socketserver
import sys

from common import Digest, Steps, options


class Echo(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        print(f"connection from {self.client_address[1]}", flush=True)
        for line in self.rfile:
            self.wfile.write(line)


def serve(port: int) -> None:
    socketserver.ThreadingTCPServer.allow_reuse_address = True
    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", port), Echo) as server:
        print(f"listening {server.server_address[1]}", flush=True)
        server.serve_forever()


def main() -> None:
    if "--listen" in sys.argv:
        serve(int(sys.argv[sys.argv.index("--listen") + 1]))
        return
    o = options(__doc__, server="127.0.0.1:9999")
    host, port = o.server.rsplit(":", 1)
    connection, connects, echoes = None, 0, 0
    steps = Steps(o)
    for step in steps:
        while True:
            try:
                if connection is None:
                    connection = socket.create_connection((host, int(port)), timeout=10)
                    connects += 1
                connection.sendall(f"{step}\n".encode())
                answer = connection.recv(100)
                if answer != f"{step}\n".encode():
                    raise ConnectionError(f"the server answered {answer!r}")
                break
            except OSError as error:
                print(f"connection lost at step {step}: {error}", flush=True)
                if connects > 20:
                    raise
                connection = None
        echoes += 1
        steps.say(f"connects {connects}")
    digest = Digest()
    digest.add("echoes", echoes)
    digest.finish()


if __name__ == "__main__":
    main()
