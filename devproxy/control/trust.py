# SPDX-License-Identifier: Apache-2.0
"""What the hosts of one owner know one another by: a certificate authority of their own, and a certificate under it.

$DEVPROXY_TRUST_DIR, else ~/.config/devproxy/trust: ca.pem, host.pem, host.key. `devproxy trust` makes them once, on one
host; the folder is copied to the others. Whoever has it may join the owner's jobs, so it is as secret as an ssh key.
Both ends of every connection between hosts prove that they have it (mTLS).
"""

from __future__ import annotations

import datetime
import os
import stat
from typing import NamedTuple

from devproxy.control.quiet_grpc import grpc
from devproxy.errors import Refused

VARIABLE = "DEVPROXY_TRUST_DIR"
NAME = "devproxy"  # in every certificate, whatever the host is called
VALID_DAYS = 3650
_NAMES = ("ca.pem", "host.pem", "host.key")


class Trust(NamedTuple):
    ca: bytes
    certificate: bytes
    key: bytes

    def server(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], root_certificates=self.ca, require_client_auth=True
        )

    def channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)


def folder() -> str:
    if given := os.environ.get(VARIABLE):
        return os.path.abspath(given)
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(config, "devproxy", "trust")


def load() -> Trust:
    """Raises Refused where it is not there, or where others can read the key."""
    path = folder()
    try:
        info = os.stat(os.path.join(path, "host.key"))
        if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise Refused(
                f"{path}/host.key can be read by others, or is not yours",
                "chmod 600 it if nobody can have read it; else make a new one: devproxy trust",
            )
        read = []
        for name in _NAMES:
            with open(os.path.join(path, name), "rb") as file:
                read.append(file.read())
        return Trust(*read)
    except OSError as error:
        raise Refused(
            f"{path}: {error.strerror}: the hosts of a job know one another by it",
            f"make it once (devproxy trust) and copy the folder to each host, or set {VARIABLE}",
        ) from None


def make() -> str:
    """A new authority and a certificate. Returns the folder. Raises Refused where there is one already."""
    # Only for this verb.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    path = folder()
    if os.path.lexists(path):
        raise Refused(f"{path} is there already", "copy it to the other hosts, or remove it first")
    now = datetime.datetime.now(datetime.timezone.utc)

    def begin(name: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:  # fmt: skip
        return (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        )

    def _name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _name("devproxy authority")
    ca = (
        begin("devproxy authority", authority, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    certificate = (
        begin(NAME, authority, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )  # the authority's own key is not kept: there is one certificate
    texts = (
        ca.public_bytes(Encoding.PEM),
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
    fresh = f"{path}.{os.getpid()}"
    try:
        os.makedirs(fresh, mode=0o700)
        for name, text in zip(_NAMES, texts, strict=True):
            fd = os.open(os.path.join(fresh, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(fd, "wb") as file:
                file.write(text)
        os.rename(fresh, path)  # fails where somebody else was quicker: theirs is not empty
    except OSError as error:
        raise Refused(f"{path} cannot be made: {error.strerror}", f"set {VARIABLE}") from None
    return path
