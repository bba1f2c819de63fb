"""Whatever else goes wrong, a password is not shown."""

from __future__ import annotations

import json
from collections import OrderedDict
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.servicekit import secrets
from penstock.servicekit.secrets import conceal, conceal_url, mask, mask_url


@pytest.fixture(autouse=True)
def _nothing_concealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_concealed", OrderedDict())
    monkeypatch.setattr(secrets, "_pattern", None)


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
        pytest.param("x://user:password@h", "x://user:password@h", id="an example of a URL"),
        pytest.param(
            "sqlite://u:pw@/var/p.db", "sqlite://u:<redacted>@/var/p.db", id="where none belongs"
        ),
        pytest.param("grpc://abcdef@h:1", "grpc://<redacted>@h:1", id="a token for a user"),
        pytest.param(
            "postgresql://h/d?p%61ssword=pw&x=1",
            "postgresql://h/d?p%61ssword=<redacted>&x=1",
            id="a name in disguise",
        ),
        pytest.param(
            "host=db password=p@ss user=u", "host=db password=<redacted> user=u", id="a DSN"
        ),
        pytest.param(
            "host=db password = 'my \\' pw' user=u",
            "host=db password = <redacted> user=u",
            id="a DSN with quotes and spaces",
        ),
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
        pytest.param(
            """{'user': 'u', 'password': 'hunter 2', "token": "abc"}""",
            """{'user': 'u', 'password': '<redacted>', "token": "<redacted>"}""",
            id="members",
        ),
        pytest.param(
            r"""{"config": "{\"password\": \"hunter 2\", \"user\": \"u\"}"}""",
            r"""{"config": "{\"password\": \"<redacted>\", \"user\": \"u\"}"}""",
            id="members of a string",
        ),
        pytest.param("password: hunter2, user: u", "password: <redacted>, user: u", id="YAML"),
        pytest.param(
            '{password: "${env:PGPASSWORD}"}', '{password: "${env:PGPASSWORD}"}', id="a reference"
        ),
        pytest.param(
            "Authorization: Basic dXNlcjpwdw==", "Authorization: Basic <redacted>", id="basic"
        ),
        pytest.param('key: ["/id"], the basic rule', 'key: ["/id"], the basic rule', id="words"),
        pytest.param(
            "FATAL:  password authentication failed for user",
            "FATAL:  password authentication failed for user",
            id="a word of the server",
        ),
    ],
)
def test_masking_a_text_hides_secrets_and_nothing_else(text: str, want: str) -> None:
    assert mask(text) == want


@given(st.text(min_size=6, max_size=20).filter(lambda text: text not in secrets._NO_SECRETS))
def test_what_is_concealed_is_not_seen_however_it_is_written(secret: str) -> None:
    conceal(secret)
    for text in (secret, repr(secret), quote(secret), quote_plus(secret), json.dumps(secret)):
        shown = mask(f"psycopg said ({text}) and left")
        assert text.strip("'\"") not in shown or text.strip("'\"") in secrets.REDACTED
        assert mask(shown) == shown


@pytest.mark.parametrize(
    ("url", "leaks"),
    [
        pytest.param("postgresql://u:hunter22@h/d", "hunter22", id="a password"),
        pytest.param("postgresql://u:hunt%40er22@h/d", "hunt@er22", id="as the driver reads it"),
        pytest.param("postgresql://h/d?password=hunter22", "hunter22", id="an option"),
        pytest.param("grpc://hunter22@h:1", "hunter22", id="a token for a user"),
        pytest.param("grpc://h:1?token=hunter22", "hunter22", id="a token"),
        pytest.param("host=h password='hunter 22'", "hunter 22", id="a DSN"),
        pytest.param("s3://KEY:hunter22@bucket/x", "hunter22", id="a blob store"),
    ],
)
def test_the_secret_of_a_url_is_hidden_wherever_it_turns_up(url: str, leaks: str) -> None:
    conceal_url(url)
    assert mask(f'could not translate host name "{leaks}" to address') == (
        'could not translate host name "<redacted>" to address'
    )


def test_names_that_stand_beside_a_password_are_still_shown() -> None:
    conceal_url("postgresql://warehouse:warehouse@db/warehouse")
    conceal_url("grpc://h:1?token_file=/etc/penstock/token&key=/etc/penstock/key.pem")
    text = "warehouse of penstock, /etc/penstock/token"
    assert mask(text) == text


def test_what_is_concealed_is_bounded() -> None:
    for n in range(2_000):
        conceal(f"secret-{n}")
    assert len(secrets._concealed) <= 512
    assert mask("secret-1999") == secrets.REDACTED
    assert mask("said ab", "ab") == f"said {secrets.REDACTED}"
