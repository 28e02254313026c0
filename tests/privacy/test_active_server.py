"""A server that does not follow the protocol, against the real key holder behind its wire."""

from __future__ import annotations

import struct
import threading
from itertools import combinations

import numpy as np
import pytest

pytest.importorskip("tenseal")

from fedcohort.privacy.keyholder import KeyHolder
from fedcohort.privacy.products import Row
from fedcohort.privacy.scheme import DEGREE, capacity, dumped, largest_count, loaded, make_keys, scheme, sealapi
from fedcohort.privacy.service import KeyHolderServer, RemoteKeyHolder

CLASSES, DIGITS = 10, 25  # 3^25 < t: so many coefficients of the key fit into one number


def test_one_request_takes_the_secret_key() -> None:
    """Rows with chosen polynomials in the place of products, sizes the server states itself, no diagonal: 328 rows."""
    secret, evaluation = make_keys(CLASSES)
    names = [f"client-{i}" for i in range(40)]
    sealed = secret.public.seal("client-0", [3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
    server = KeyHolderServer(KeyHolder(secret, names), "token")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        remote = RemoteKeyHolder(server.url, "token", patience=60)
        t, q = scheme().modulus, int(sealapi().CoeffModulus.Create(DEGREE, [60, 49, 49, 60])[0].value())
        example = sealapi().Ciphertext(scheme().context)
        evaluation.public.encryptor.encrypt_zero(example)
        scheme().evaluator.mod_switch_to_inplace(example, scheme().context.last_parms_id())
        magic = dumped(example)[:5]

        def part(body: bytes) -> bytes:
            return magic + b"\0\0\0" + struct.pack("<Q", 16 + len(body)) + body

        def chosen(first: int) -> bytes:
            """(c0, c1) with c0 + c1 s = q/t sum_k 3^k (s_k + 1) in the constant coefficient."""
            c0, c1 = [0] * DEGREE, [0] * DEGREE
            for i in range(first, min(first + DIGITS, DEGREE)):
                value = (3 ** (i - first) * capacity(CLASSES) % t * q + t // 2) // t % q
                c1[-i % DEGREE] = value if i == 0 else -value % q
            c0[0] = (sum(3**k for k in range(DIGITS)) * capacity(CLASSES) % t * q + t // 2) // t % q
            numbers = part(struct.pack("<Q", 2 * DEGREE) + np.array([*c0, *c1], "<u8").tobytes())
            return part(struct.pack("<4QBQQQdQ", *example.parms_id(), 0, 2, DEGREE, 1, 1.0, 1) + numbers)

        firsts = range(0, DEGREE, DIGITS)
        rows = [Row(a, (b,), chosen(first)) for first, (a, b) in zip(firsts, combinations(names, 2), strict=False)]
        assert len(rows) == 328
        opened = remote.open(rows, dict.fromkeys(names, CLASSES * largest_count(CLASSES)))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    key = [value // 3**k % 3 - 1 for (value,) in opened for k in range(DIGITS)][:DEGREE]
    assert set(key) == {-1, 0, 1}
    ciphertext = loaded("Ciphertext", sealed.partition(b"\n")[2], "what a client sent")
    scheme().evaluator.mod_switch_to_inplace(ciphertext, scheme().context.last_parms_id())
    numbers = [int(ciphertext.dyn_array().at(i)) for i in range(2 * DEGREE)]
    found = []
    for i in range(0, CLASSES * capacity(CLASSES), capacity(CLASSES)):
        mixed = sum(numbers[DEGREE + j] * (key[i - j] if j <= i else -key[DEGREE + i - j]) for j in range(DEGREE))
        found.append(((numbers[i] + mixed) % q * t + q // 2) // q % t)
    assert found == [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
