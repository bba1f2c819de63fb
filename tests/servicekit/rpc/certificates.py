"""Certificates for tests of TLS, made by OpenSSL."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate(directory: Path, name: str, issuer: str | None = None) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by `issuer`, or by itself."""
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    signed = (
        ["-CA", f"{directory}/{issuer}.pem", "-CAkey", f"{directory}/{issuer}.key"]
        if issuer
        else []
    )
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
        "-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
        "-addext", f"basicConstraints=critical,CA:{'FALSE' if issuer else 'TRUE'}",
        "-keyout", key, "-out", cert, *signed,
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return cert, key
