"""A running service takes changed keys, certificates and limits; other settings wait."""

import logging
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from disagg.config import Config, load_config
from disagg.errors import ConfigError
from disagg.server.live_settings import LIVE_KEYS, plan_update
from disagg.server.service import Service
from tests.papers import make_papers
from tests.server.running import serving

FLAGS = {"cluster.colocated": True, "server.port": 0}


def test_an_update_takes_live_settings_only():
    new = load_config(None, {"router.max_queue": 7, "server.port": 7, "codec": "raw"})

    update = plan_update(Config(), new)

    assert update.applied == ("router.max_queue",)
    assert update.fixed == ("codec", "server.port")
    assert update.config == load_config(None, {"router.max_queue": 7})


def test_without_changes_there_is_nothing_to_update():
    update = plan_update(Config(), Config())

    assert update.config == Config()
    assert update.applied == update.fixed == ()


@pytest.mark.parametrize("key", sorted(LIVE_KEYS))
def test_every_live_setting_exists(key):
    new = load_config(None, {key: "7" if "key" in key else 7777})

    assert plan_update(Config(), new).applied == (key,)


@pytest.fixture
def new_papers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes a folder of new certificates."""
    return lambda: make_papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture
def files(tmp_path: Path, new_papers: Callable[[], Path]) -> dict[str, str]:
    """The files of a service with a key and HTTPS."""
    papers = new_papers()
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    return {
        "server.api_key_file": str(keys),
        "server.tls_certificate": str(papers / "ca"),
        "server.tls_key": str(papers / "ca.key"),
    }


@pytest.fixture
def service(files: dict[str, str]) -> Iterator[Service]:
    """A service with a key and HTTPS whose worker lives in this process."""
    with serving(load_config(None, FLAGS | files)) as service:
        yield service


def status_of(service: Service, key: str) -> int:
    """The status of a request with a key."""
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{service.url}/v1/models"
    return httpx.get(url, headers=headers, verify=False).status_code


def test_keys_are_read_again(service, files):
    Path(files["server.api_key_file"]).write_text("two\n")

    service.reload(service.config)

    assert [status_of(service, key) for key in ("one", "two")] == [401, 200]


def test_the_owners_secret_stays_good(service, files):
    Path(files["server.api_key_file"]).write_text("two\n")

    service.reload(service.config)

    assert status_of(service, service.secret) == 200


def test_a_new_certificate_serves_new_connections(service, files, new_papers):
    address = httpx.URL(service.url).host, httpx.URL(service.url).port
    first = ssl.get_server_certificate(address)
    papers = new_papers()
    for name, key in ("ca", "server.tls_certificate"), ("ca.key", "server.tls_key"):
        Path(files[key]).write_bytes((papers / name).read_bytes())

    service.reload(service.config)

    second = ssl.get_server_certificate(address)
    assert second != first
    assert second.strip() == (papers / "ca").read_text().strip()


def test_limits_of_the_router_change(service):
    router = replace(service.config.router, max_queue=7, deadline_s=9.0)

    service.reload(replace(service.config, router=router))

    assert service.config.router == router
    # the loop of the router has run what came before this answer
    assert status_of(service, "one") == 200
    assert service._router.config == router


def test_limits_of_clients_change(service):
    server = replace(service.config.server, max_connections=7, max_body_bytes=1024)

    service.reload(replace(service.config, server=server))

    body = {"prompt": "x" * 1024}
    headers = {"Authorization": "Bearer one"}
    url = f"{service.url}/v1/completions"
    answer = httpx.post(url, json=body, headers=headers, verify=False)
    assert answer.json()["error"]["type"] == "too_large"
    http = service._http
    assert http.pool.limits.max_connections == 7


def test_settings_that_need_a_restart_are_named_in_one_line(service, caplog):
    caplog.set_level(logging.WARNING, "disagg")
    old = service.config

    service.reload(load_config(None, {"engine.max_sequences": 7, "codec": "raw"}))

    (message,) = caplog.messages
    assert message.startswith("these settings need a restart to change: codec, ")
    assert "engine.max_sequences" in message
    assert service.config.engine == old.engine


def test_keys_that_cannot_be_read_change_nothing(service, files):
    Path(files["server.api_key_file"]).write_text("\n")
    router = replace(service.config.router, max_queue=7)

    with pytest.raises(ConfigError, match="no key"):
        service.reload(replace(service.config, router=router))

    assert status_of(service, "one") == 200
    assert service.config.router != router


def test_a_key_of_another_certificate_changes_nothing(service, files, new_papers):
    papers = new_papers()
    Path(files["server.tls_key"]).write_bytes((papers / "ca.key").read_bytes())
    Path(files["server.api_key_file"]).write_text("two\n")

    with pytest.raises(ConfigError, match="no HTTPS"):
        service.reload(service.config)

    assert status_of(service, "one") == 200
