"""Whatever else goes wrong, a password is not shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.servicekit.secrets import mask, mask_url


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        pytest.param("memory:", "memory:", id="nothing to hide"),
        pytest.param("sqlite:////var/p.db", "sqlite:////var/p.db", id="a path"),
        pytest.param(
            "postgresql://u:pw@h:5432/d", "postgresql://u:<redacted>@h:5432/d", id="a password"
        ),
        pytest.param("postgresql://u@h/d", "postgresql://u@h/d", id="a user without password"),
        pytest.param(
            "postgresql://u:p@s/w@h/d", "postgresql://u:<redacted>@h/d", id="@ and / unescaped"
        ),
        pytest.param("postgresql://u:p?w@h/d", "postgresql://u:<redacted>@h/d", id="? unescaped"),
        pytest.param(
            "postgresql://h:1/d?password=pw&sslmode=require",
            "postgresql://h:1/d?password=<redacted>&sslmode=require",
            id="a password as an option",
        ),
        pytest.param(
            "grpc://h:1?Token=abc&tls=on&sslkey=k",
            "grpc://h:1?Token=<redacted>&tls=on&sslkey=<redacted>",
            id="names that sound secret",
        ),
        pytest.param("u:pw@h", "u:<redacted>@h", id="no scheme at all"),
        pytest.param(
            "postgresql://h:1/d?application_name=me@x",
            "postgresql://h:<redacted>@x",
            id="@ in an option: too much is better than too little",
        ),
    ],
)
def test_masking_a_url_hides_secrets_and_nothing_else(url: str, masked: str) -> None:
    assert mask_url(url) == masked


@given(st.text(alphabet="ab:@/?#%&= ", min_size=1, max_size=12))
def test_no_password_survives_masking(noise: str) -> None:
    word = "hunter2"
    for password in (word + noise, noise + word, noise + word + noise):
        assert word not in mask_url(f"postgresql://user:{password}@host:5432/db")
        if not any(map(str.isspace, password)):
            assert word not in mask(f"cannot reach postgresql://user:{password}@host:5432/db.")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param(
            "postgresql://app:hunter2@db:5432/penstock?sslmode=require",
            "postgresql://app:<redacted>@db:5432/penstock?sslmode=require",
            id="password of a URL",
        ),
        pytest.param(
            "postgresql://app:p@ss:w@db/x", "postgresql://app:<redacted>@db/x", id="an @ inside it"
        ),
        pytest.param(
            "grpc://h:1?tls=on&token=abc&api_key=def&x=1",
            "grpc://h:1?tls=on&token=<redacted>&api_key=<redacted>&x=1",
            id="secret-sounding query values",
        ),
        pytest.param(
            "host=db password=hunter2 dbname=x",
            "host=db password=<redacted> dbname=x",
            id="connection string",
        ),
        pytest.param(
            "authorization: Bearer abc.def", "authorization: Bearer <redacted>", id="token"
        ),
        pytest.param(
            "sqlite:////data/consensus.db", "sqlite:////data/consensus.db", id="no secret"
        ),
        pytest.param("seqno=5 shard=a", "seqno=5 shard=a", id="plain fields"),
    ],
)
def test_masking_a_text_hides_secrets_and_nothing_else(text: str, want: str) -> None:
    assert mask(text) == want
