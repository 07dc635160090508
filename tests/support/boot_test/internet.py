"""The internet of a virtual machine: answers one HTTPS request on stdin. QEMU starts it for each connection.

internet.py FOLDER: a folder with cert.pem, key.pem and the file `installer`, which every request gets. Without the
file there is no answer, as behind a route that leads nowhere.
"""

import socket
import ssl
import sys
import time
from pathlib import Path


def main(folder: Path) -> None:
    """Answer the request, or hold the connection without an answer."""
    if not (folder / "installer").exists():
        time.sleep(60)
        return
    content = (folder / "installer").read_bytes()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    with context.wrap_socket(socket.socket(fileno=0), server_side=True) as connection:
        request = b""
        while b"\r\n\r\n" not in request:
            request += connection.recv(65536)
        header = f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        connection.sendall(header.encode() + content)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
