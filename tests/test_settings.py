from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import UserError
from penstock.settings import Settings


def test_a_flag_wins_over_the_environment_and_the_file(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('master = "local[1]"\nlog-level = "error"\n')
    environ = {"PENSTOCK_MASTER": "local[2]", "PENSTOCK_DATA": "from-env"}
    settings = Settings.resolve({"master": "local[3]", "data": None}, environ, [tmp_path])
    assert settings.master == "local[3]"
    assert settings.data == Path("from-env")
    assert settings.log_level == "error"


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('master = "local[1]"\n')
    settings = Settings.resolve({}, {"PENSTOCK_MASTER": "local[2]"}, [tmp_path])
    assert settings.master == "local[2]"


def test_stores_default_to_the_data_directory() -> None:
    settings = Settings.resolve({"data": Path("/srv/d")}, {})
    assert settings.consensus == "sqlite:////srv/d/consensus.db"
    assert settings.blob == "/srv/d/blobs"


def test_spark_settings_come_as_pairs_or_as_a_table(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('[conf]\n"spark.driver.memory" = "2g"\n')
    assert Settings.resolve({}, {}, [tmp_path]).conf == {"spark.driver.memory": "2g"}
    assert Settings.resolve({"conf": ["a=b=c"]}, {}).conf == {"a": "b=c"}


@pytest.mark.parametrize(
    ("flags", "environ", "toml", "message"),
    [
        pytest.param({"conf": ["x"]}, {}, "", "is not of the form key=value", id="conf"),
        pytest.param({"log_level": "loud"}, {}, "", "unknown log level", id="log level"),
        pytest.param({}, {"PENSTOCK_LOG_JSON": "maybe"}, "", "PENSTOCK_LOG_JSON", id="flag"),
        pytest.param({}, {}, "mastr = 'x'", 'did you mean "master"', id="misspelt setting"),
        pytest.param({}, {}, "master = 3", "expected text", id="wrong type"),
        pytest.param({}, {}, "master = ", "cannot read", id="not toml"),
    ],
)
def test_a_wrong_setting_says_where_and_what(
    tmp_path: Path, flags: dict[str, object], environ: dict[str, str], toml: str, message: str
) -> None:
    (tmp_path / "penstock.toml").write_text(toml)
    with pytest.raises(UserError) as e:
        Settings.resolve(flags, environ, [tmp_path])
    assert message in str(e.value)
