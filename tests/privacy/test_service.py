"""The key holder behind a wire: TLS, token, limits, and every refusal as the error it is."""

from __future__ import annotations

import datetime
import http.client
import ipaddress
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tenseal")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedcohort.clients import LabelGram
from fedcohort.errors import CiphertextError, InputError, KeyHolderError, UnknownNameError
from fedcohort.privacy.keyholder import ROW_LIMIT, ClientRefusedError, KeyHolder
from fedcohort.privacy.openers import EncryptedLabels
from fedcohort.privacy.products import Row, SealedLabels
from fedcohort.privacy.scheme import PublicKey, SecretKey, make_keys
from fedcohort.privacy.service import KeyHolderServer, RemoteKeyHolder, make_folder, open_folder

SECRET, EVALUATION = make_keys(3)
COUNTS = np.array([[9, 1, 0], [2, 2, 6], [0, 5, 4], [7, 0, 2]])
NAMES = ["anna", "ben", "cem", "dora"]
SIZES = {n: int(c.sum()) for n, c in zip(NAMES, COUNTS, strict=True)}


def sealed(*names: str) -> dict[str, bytes]:
    return {n: SECRET.public.seal(n, COUNTS[NAMES.index(n)]) for n in names or NAMES}


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


class Served:
    def __init__(self, tls: Path | None = None, **kwargs: Any) -> None:
        files = {} if tls is None else dict(zip(("certificate", "key"), self_signed(tls), strict=True))
        self.holder = KeyHolder(SECRET, NAMES)
        self.server = KeyHolderServer(self.holder, "secret-token", **files, **kwargs)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        self.remote = RemoteKeyHolder(self.server.url, "secret-token", authority=files.get("certificate"), patience=20)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def served() -> Iterator[Served]:
    it = Served(per_minute=1000)
    yield it
    it.close()


def test_opens_what_the_key_holder_opens_over_tls(tmp_path: Path) -> None:
    served = Served(tls=tmp_path)
    try:
        assert served.server.url.startswith("https://")
        assert served.remote.key() == {"key": SECRET.public.name, "classes": 3, "clients": 4}
        labels = EncryptedLabels(EVALUATION, served.remote).open(sealed(), SIZES, ())
        assert isinstance(labels, LabelGram) and np.array_equal(labels.gram, COUNTS @ COUNTS.T)
        assert np.array_equal(served.remote.known(["ben"], NAMES), COUNTS[[1]] @ COUNTS.T)
        with pytest.raises(KeyHolderError, match="certificate"):  # somebody else's certificate is not trusted
            RemoteKeyHolder(served.server.url, "secret-token", patience=5).key()
    finally:
        served.close()


def test_refusals_arrive_as_what_they_are(served: Served) -> None:
    rows = SealedLabels(EVALUATION).rows(sealed())
    remote = served.remote
    with pytest.raises(UnknownNameError, match="'eve'"):
        remote.known(["eve"], NAMES)
    with pytest.raises(UnknownNameError, match="'eve'"):
        remote.open([Row("eve", rows[0].block, rows[0].body)], SIZES)
    with pytest.raises(CiphertextError, match="oversize"):
        remote.open([Row("anna", rows[0].block, b"x" * (ROW_LIMIT + 1))], SIZES)
    with pytest.raises(CiphertextError, match="cannot be read"):
        remote.open([Row("anna", rows[0].block, rows[0].body[:1000])], SIZES)
    with pytest.raises(ClientRefusedError) as caught:
        remote.open(rows, {**SIZES, "cem": 1000})
    assert caught.value.client == "cem"
    assert remote.readable(rows) == [True] * 4
    assert np.isnan(remote.known(NAMES, NAMES)).all()  # nothing of it cost anything
    remote.open(rows, SIZES)
    with pytest.raises(CiphertextError, match="opened before"):
        remote.open(rows, SIZES)


def raw(served: Served, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", served.server.server_address[1], timeout=20)
    connection.request(method, path, body, {"Authorization": "Bearer secret-token", **headers})
    reply = connection.getresponse()
    found = reply.status, json.loads(reply.read())
    connection.close()
    return found


def test_nothing_but_s_is_answered(served: Served) -> None:
    assert raw(served, "GET", "/v1/secret")[0] == 404
    assert raw(served, "POST", "/v1/decrypt", b"{}\n")[0] == 404
    assert raw(served, "POST", "/v1/open", b"not json\n")[0] == 400
    assert raw(served, "POST", "/v1/open", b"[]\n")[0] == 400
    assert (
        raw(served, "POST", "/v1/open", b'{"rows": [{"client": "anna", "block": 7, "bytes": 1}], "blocks": []}\n')[0]
        == 400
    )
    assert raw(served, "POST", "/v1/known", b'{"rows": "anna", "columns": []}\n')[0] == 400
    code, body = raw(
        served, "POST", "/v1/open", b'{"rows": [{"client": "anna", "block": 0, "bytes": 5}], "blocks": [["ben"]]}\n'
    )
    assert code == 422 and "truncated" in body["message"]


def test_token_and_strangers(served: Served) -> None:
    for wrong in ("", "Bearer", "Bearer secret-tokem", "secret-token"):
        assert raw(served, "GET", "/v1/key", Authorization=wrong)[0] == 401
    with pytest.raises(KeyHolderError, match="token"):
        RemoteKeyHolder(served.server.url, "guess").key()


def test_rate_limit_counts_refusals_more() -> None:
    now = [0.0]
    served = Served(per_minute=12, clock=lambda: now[0])
    try:
        waits: list[float] = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            now[0] += seconds

        remote = RemoteKeyHolder(served.server.url, "secret-token", patience=100, sleep=sleep)
        for _ in range(6):
            remote.key()
        with pytest.raises(UnknownNameError):
            remote.known(["eve"], NAMES)  # 1 + 5: the allowance is spent
        assert not waits
        remote.key()
        assert waits and waits[0] >= 5.0  # a request is earned every five seconds
        impatient = RemoteKeyHolder(served.server.url, "secret-token", patience=0.5, sleep=sleep)
        with pytest.raises(KeyHolderError, match="Too many requests"):
            impatient.key()
    finally:
        served.close()


def test_a_peer_that_stays_silent_keeps_nobody_waiting(tmp_path: Path) -> None:
    served = Served(tls=tmp_path)
    try:
        with socket.create_connection(served.server.server_address[:2]):
            assert served.remote.key()["classes"] == 3
    finally:
        served.close()


def test_tls_or_this_machine() -> None:
    with pytest.raises(KeyHolderError, match="must use TLS"):
        KeyHolderServer(KeyHolder(SECRET, NAMES), "t", ("0.0.0.0", 0))
    with pytest.raises(KeyHolderError, match="Without TLS"):
        RemoteKeyHolder("http://example.org:80", "t")
    with pytest.raises(KeyHolderError, match="https://host:port"):
        RemoteKeyHolder("example.org", "t")
    with pytest.raises(KeyHolderError, match="cannot be asked"):
        RemoteKeyHolder("http://127.0.0.1:9", "t", patience=2).key()


def test_folder(tmp_path: Path) -> None:
    folder = tmp_path / "holder"
    make_folder(folder, 3, ["anna", "", "ben "])
    assert (folder / "secret.key").stat().st_mode & 0o777 == 0o600
    secret = SecretKey.from_bytes((folder / "secret.key").read_bytes())
    for public in ("public.key", "evaluation.key", "clients.txt"):
        assert secret.body not in (folder / public).read_bytes()
    holder, token = open_folder(folder)
    assert holder.agreed == ("anna", "ben") and len(token) > 30
    assert (folder / "opened.sqlite").stat().st_mode & 0o777 == 0o600
    assert PublicKey.from_bytes((folder / "public.key").read_bytes()).name == holder.key_name
    with pytest.raises(KeyHolderError, match="holds a key already"):
        make_folder(folder, 3, ["anna", "ben"])
    holder.close()
    os.chmod(folder / "secret.key", 0o644)
    with pytest.raises(KeyHolderError, match="Others can read"):
        open_folder(folder)
    with pytest.raises(KeyHolderError, match=r"no secret\.key"):
        open_folder(tmp_path)
    with pytest.raises(InputError, match="at least two"):
        make_folder(tmp_path / "other", 3, ["anna"])


def test_commands(tmp_path: Path) -> None:
    (tmp_path / "clients.txt").write_text("\n".join(NAMES))
    command = [sys.executable, "-m", "fedcohort.cli.app", "keyholder"]
    made = subprocess.run(
        [*command, "new", "holder", "--classes", "3", "--clients", "clients.txt"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    process = subprocess.Popen(
        [*command, "serve", "holder", "--port", "0"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        url = said.split(" at ")[1].strip()
        remote = RemoteKeyHolder(url, tmp_path / "holder" / "token", patience=20)
        public = PublicKey.from_bytes((tmp_path / "holder" / "public.key").read_bytes())
        opener = EncryptedLabels(tmp_path / "holder" / "evaluation.key", remote)
        sent = {n: public.seal(n, c) for n, c in zip(NAMES, COUNTS, strict=True)}
        labels = opener.open(sent, SIZES, ())
        assert isinstance(labels, LabelGram) and np.array_equal(labels.gram, COUNTS @ COUNTS.T)
    finally:
        process.terminate()
        process.wait(20)
