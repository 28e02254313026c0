"""The key holder over a connection: TLS, token, limits, and every refusal raised as its own error."""

from __future__ import annotations

import datetime
import http.client
import ipaddress
import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography.hazmat.primitives.hpke")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

from fedcohort.cli.app import app
from fedcohort.core.clients import LabelGram
from fedcohort.core.errors import CiphertextError, InputError, KeyHolderError, UnknownNameError
from fedcohort.privacy.label_decoders import EncryptedLabels
from fedcohort.privacy.scheme import ClientKey, LabelSeal, PublicKey, SecretKey
from fedcohort.privacy.service import KeyHolderServer, RemoteKeyHolder, make_client_key, make_folder, open_folder

COUNTS = np.array([[9, 1, 0], [2, 2, 6], [0, 5, 4], [7, 0, 2]])
NAMES = ["anna", "ben", "cem", "dora"]


def self_signed(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "keyholder")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "tls.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "tls.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "tls.pem", folder / "tls.key"


def test_tells_what_the_key_holder_tells_over_tls(federation: Any, tmp_path: Path) -> None:
    found = federation(COUNTS, NAMES)
    certificate, key = self_signed(tmp_path)
    with found.served(certificate=certificate, key=key) as remote:
        assert remote.public == found.public
        labels = EncryptedLabels(found.public, remote).open(found.statements(), found.sizes, ())
        assert isinstance(labels, LabelGram) and np.array_equal(labels.gram, found.gram)
        assert np.array_equal(remote.products(["ben"], NAMES), found.gram[[1]])
        found.seal("cem").confirm("cem", COUNTS[2], remote.confirm(["cem"])["cem"])
        host = repr(remote).partition("(")[2][:-1]
        with pytest.raises(KeyHolderError):  # somebody else's certificate is not trusted
            RemoteKeyHolder(f"https://{host}", "secret-token", patience=5).admit({})


def test_refusals_arrive_as_what_they_are(federation: Any) -> None:
    found = federation(COUNTS, NAMES)
    with found.served() as remote:
        with pytest.raises(UnknownNameError, match="'eve'"):
            remote.products(["eve"], NAMES)
        sent = {**found.statements(), "eve": b"junk", "cem": found.statement("cem")[:-9]}
        refused = remote.admit(sent)
        assert refused.keys() == {"eve", "cem"}
        assert "not enrolled" in refused["eve"] and "truncated" in refused["cem"]
        with pytest.raises(UnknownNameError, match="'cem'"):
            remote.confirm(["anna", "cem"])
        with pytest.raises(InputError, match=r"at most [0-9]+ bytes"):
            remote.admit({"anna": bytes(10_000_000)})


def raw(served: str, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, Any]]:
    host, port = served.partition("(")[2][:-1].split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.request(method, path, body, {"Authorization": "Bearer secret-token", **headers})
    reply = connection.getresponse()
    found = reply.status, json.loads(reply.read())
    connection.close()
    return found


def test_nothing_but_s_is_answered(federation: Any) -> None:
    with federation(COUNTS, NAMES).served() as remote:
        at = repr(remote)
        for method, path in (("GET", "/v1/secret"), ("POST", "/v1/decrypt"), ("POST", "/v1/key"), ("GET", "/")):
            assert raw(at, method, path, b"{}")[0] == 404
        for path, body in (
            ("/v1/admit", b"not json"),
            ("/v1/admit", b"[]"),
            ("/v1/admit", b"7"),
            ("/v1/admit", b"[" * 100_000),
            ("/v1/admit", b'{"statements": ["anna"]}'),
            ("/v1/admit", b'{"statements": {"anna": 7}}'),
            ("/v1/admit", b'{"statements": {"anna": "not base64!"}}'),
            ("/v1/products", b'{"rows": "anna", "columns": []}'),
            ("/v1/products", b'{"rows": [["anna"]], "columns": []}'),
            ("/v1/products", b"{}"),
            ("/v1/confirm", b'{"clients": [1]}'),
            ("/v1/confirm", b"\xff\xfe"),
        ):
            code, answer = raw(at, "POST", path, body)
            assert code == 400 and "cannot be read" in answer["message"], (path, body[:50])


def test_token(federation: Any) -> None:
    with federation(COUNTS, NAMES).served() as remote:
        for wrong in ("", "Bearer", "Bearer secret-tokem", "secret-token"):
            assert raw(repr(remote), "GET", "/v1/key", Authorization=wrong)[0] == 401
        host = repr(remote).partition("(")[2][:-1]
        with pytest.raises(KeyHolderError):
            RemoteKeyHolder(f"http://{host}", "guess").admit({})


def test_a_peer_that_stays_silent_keeps_nobody_waiting(federation: Any, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    with federation(COUNTS, NAMES).served(certificate=certificate, key=key) as remote:
        host, port = repr(remote).partition("(")[2][:-1].split(":")
        with socket.create_connection((host, int(port))):
            assert remote.public.classes == 3


def test_the_logging_of_the_program_around_it_stays(federation: Any) -> None:
    """uvicorn's own configuration would close every handler there is, and some handlers close their streams."""
    closed: list[str] = []

    class Handler(logging.NullHandler):
        def close(self) -> None:
            closed.append("closed")
            super().close()

    handler = Handler()
    with federation(COUNTS, NAMES).served() as remote:
        assert remote.public is not None
    assert not closed
    handler.close()


def test_tls_or_this_machine(federation: Any) -> None:
    with pytest.raises(KeyHolderError):
        KeyHolderServer(federation(COUNTS, NAMES).holder, "t", ("0.0.0.0", 0))
    with pytest.raises(KeyHolderError):
        RemoteKeyHolder("http://example.org:80", "t")
    with pytest.raises(KeyHolderError, match="https://host:port"):
        RemoteKeyHolder("example.org", "t")
    with pytest.raises(KeyHolderError):
        RemoteKeyHolder("http://127.0.0.1:9", "t", patience=2).admit({})


def test_folder(federation: Any, tmp_path: Path) -> None:
    folder = tmp_path / "holder"
    lines = federation(COUNTS, NAMES).lines
    make_folder(folder, 3, [lines[0], "", lines[1] + " "], 500)
    assert (folder / "secret.key").stat().st_mode & 0o777 == 0o600
    secret = SecretKey.from_bytes((folder / "secret.key").read_bytes())
    for public in ("public.key", "clients.txt"):
        assert secret.body not in (folder / public).read_bytes()
    holder, token = open_folder(folder)
    assert holder.enrolled == ("anna", "ben") and len(token) > 30
    assert (folder / "statements.sqlite").stat().st_mode & 0o777 == 0o600
    assert PublicKey.from_bytes((folder / "public.key").read_bytes()) == holder.public
    assert holder.public.max_samples == 500
    with pytest.raises(KeyHolderError):
        make_folder(folder, 3, lines, 500)
    holder.close()
    os.chmod(folder / "secret.key", 0o644)
    with pytest.raises(KeyHolderError):
        open_folder(folder)
    with pytest.raises(KeyHolderError, match=r"no secret\.key"):
        open_folder(tmp_path)
    for bad, match in ((lines[:1], "at least two"), (NAMES, "client-key")):
        with pytest.raises(InputError, match=match):
            make_folder(tmp_path / "other", 3, bad, 500)
    assert not (tmp_path / "other").exists()
    (folder / "secret.key").unlink()
    (folder / "secret.key").write_bytes(b'{"fedcohort": "secret key", "version": 1}\n')
    (folder / "secret.key").chmod(0o600)
    with pytest.raises(CiphertextError):  # from homomorphic encryption
        open_folder(folder)


def test_client_key_file(tmp_path: Path) -> None:
    line = make_client_key(tmp_path / "client.key", "hospital north")
    assert (tmp_path / "client.key").stat().st_mode & 0o777 == 0o600
    assert line == f"hospital north {ClientKey.from_bytes((tmp_path / 'client.key').read_bytes()).public}"
    with pytest.raises(KeyHolderError):
        make_client_key(tmp_path / "client.key", "hospital north")
    for bad in ("", " ", " anna", "anna "):
        with pytest.raises(InputError):
            make_client_key(tmp_path / "other.key", bad)
    assert not (tmp_path / "other.key").exists()


@pytest.mark.parametrize("place", ["clients.txt", "/dev/zero", "no-such"])
def test_a_file_of_clients_that_is_no_text_is_named(place: str, tmp_path: Path) -> None:
    (tmp_path / "clients.txt").write_bytes(b"anna \xff\xfe")
    arguments = [
        "privacy",
        "keyholder",
        "new",
        str(tmp_path / "holder"),
        "--classes",
        "3",
        "--clients",
        str(tmp_path / place),
    ]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 1 and isinstance(found.exception, (SystemExit, InputError)), found.exception
    assert place in str(found.exception) + found.output
    assert not (tmp_path / "holder").exists()


def test_a_folder_whose_clients_are_no_text_is_not_served(tmp_path: Path) -> None:
    lines = [make_client_key(tmp_path / f"{name}.key", name) for name in NAMES[:2]]
    make_folder(tmp_path / "holder", 3, lines, 50)
    (tmp_path / "holder" / "clients.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"clients\.txt"):
        open_folder(tmp_path / "holder")


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def done(*arguments: str) -> str:
        found = CliRunner().invoke(app, ["privacy", "keyholder", *arguments])
        assert found.exit_code == 0, found.output
        return found.stdout

    lines = [done("client-key", f"{name}.key", "--name", name) for name in NAMES[:2]]
    (tmp_path / "clients.txt").write_text("".join(lines))
    done("new", "holder", "--classes", "3", "--clients", "clients.txt", "--max-samples", "50")
    serve = [sys.executable, "-m", "fedcohort.cli.app", "privacy", "keyholder", "serve", "holder", "--port", "0"]
    process = subprocess.Popen(serve, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = process.stderr.readline().split(" at ")[1].strip()
        remote = RemoteKeyHolder(url, tmp_path / "holder" / "token", patience=20)
        public = tmp_path / "holder" / "public.key"
        opener = EncryptedLabels(public, remote)
        sent = {
            name: LabelSeal(public, tmp_path / f"{name}.key").seal(name, row)
            for name, row in zip(NAMES[:2], COUNTS, strict=False)
        }
        labels = opener.open(sent, {}, ())
        assert isinstance(labels, LabelGram) and np.array_equal(labels.gram, COUNTS[:2] @ COUNTS[:2].T)
    finally:
        process.terminate()
        assert process.wait(20) in (0, -15)
