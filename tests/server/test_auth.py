"""API keys and HTTPS: who is served, and who is not."""

from dataclasses import replace

import httpx
import openai
import pytest

from disagg.cli.client import complete, get
from disagg.cli.state_file import RunningService
from disagg.config import ServerConfig
from disagg.errors import ConfigError, DisaggError, PeerLostError
from disagg.server.app import create_app
from disagg.server.auth import check_tls, read_keys
from tests.papers import make_papers
from tests.server.running import running
from tests.server.visits import ask, refused, send

KEYS = ["one", "two"]


@pytest.mark.parametrize(
    "path", ["/v1/models", "/status", "/tokenize", "/stop", "/nowhere"]
)
@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer three", "one", "Bearer oné"],
)
def test_without_a_key_nothing_is_said(authorization, path, completions):
    headers = {} if authorization is None else {"Authorization": authorization.encode()}
    app = create_app(completions, "owner", keys=KEYS)
    response = send(app, "GET", path, headers=headers)
    assert refused(response, 401, "auth")
    assert len(response.headers["x-request-id"]) == 32


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
@pytest.mark.parametrize("key", ["one", "two", "owner"])
def test_every_key_and_the_owners_secret_are_good(key, scheme, completions):
    app = create_app(completions, "owner", keys=KEYS)
    headers = {"Authorization": f"{scheme} {key}"}
    assert send(app, "GET", "/status", headers=headers).status_code == 200
    assert (
        send(app, "POST", "/v1/completions", json=ask(), headers=headers).status_code
        == 200
    )
    stopped = send(app, "POST", "/stop", headers=headers)
    assert stopped.status_code == (200 if key == "owner" else 401)


def clients_of(app, router, *keys: str) -> list[str]:
    """The names of the clients that send a request with each of these keys."""
    router.clients.clear()
    for key in keys:
        headers = {"Authorization": f"Bearer {key}"}
        send(app, "POST", "/v1/completions", json=ask(), headers=headers)
    return router.clients.copy()


def test_a_key_gives_its_client_a_name(completions, router):
    app = create_app(completions, "owner", keys=KEYS)
    again = create_app(completions, "another owner", keys=["two", "three"])

    one, two = clients_of(app, router, "one", "two")
    after_a_restart = clients_of(again, router, "two")

    assert len({one, two, ""}) == 3
    assert after_a_restart == [two]
    assert "one" not in one


def test_without_keys_clients_have_no_names(completions, router):
    app = create_app(completions)

    assert clients_of(app, router, "one", "two") == ["", ""]


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/version", "/metrics"])
def test_probes_and_dashboards_need_no_key(path, completions):
    assert send(create_app(completions, keys=KEYS), "GET", path).status_code == 200


def test_scripts_of_allowed_pages_may_ask_and_others_may_not(completions):
    page, other = "https://chat.example", "https://elsewhere.example"
    app = create_app(completions, keys=KEYS, origins=[page])
    asking = {"Access-Control-Request-Method": "POST"}
    asking["Access-Control-Request-Headers"] = "authorization, content-type"
    for origin, allowed in ((page, page), (other, None)):
        first = send(
            app, "OPTIONS", "/v1/completions", headers=asking | {"Origin": origin}
        )
        assert first.headers.get("access-control-allow-origin") == allowed
        assert (first.status_code == 200) == (origin == page)
        headers = {"Origin": origin, "Authorization": "Bearer one"}
        for fields in ({}, {"stream": True}):
            answer = send(
                app, "POST", "/v1/completions", json=ask(**fields), headers=headers
            )
            assert answer.status_code == 200
            assert answer.headers.get("access-control-allow-origin") == allowed
        keyless = send(app, "GET", "/v1/models", headers={"Origin": origin})
        assert refused(keyless, 401, "auth")  # whose reason a page may read
        assert keyless.headers.get("access-control-allow-origin") == allowed
    response = send(
        create_app(completions), "GET", "/v1/models", headers={"Origin": page}
    )
    assert "access-control-allow-origin" not in response.headers


def test_an_empty_secret_opens_nothing(completions):
    app, headers = (
        create_app(completions, token=None, keys=KEYS),
        {"Authorization": "Bearer "},
    )
    assert send(app, "GET", "/status", headers=headers).status_code == 401


def test_keys_are_those_of_the_flag_and_of_the_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("two\n\n  three \n")
    keys = read_keys(ServerConfig(api_key="one", api_key_file=str(file)))
    assert keys == {"one", "two", "three"}
    assert read_keys(ServerConfig()) == frozenset()
    file.write_text("\ufeffone\n")
    assert read_keys(ServerConfig(api_key_file=str(file))) == {"one"}
    file.write_text("\n")
    with pytest.raises(ConfigError, match="no key in"):
        read_keys(ServerConfig(api_key_file=str(file)))
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(ServerConfig(api_key_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="api_key is empty"):
        read_keys(ServerConfig(api_key=""))


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A certificate that signs itself, for a name that is not this host's."""
    folder = make_papers(tmp_path_factory.mktemp("tls"))
    return {"tls_certificate": str(folder / "ca"), "tls_key": str(folder / "ca.key")}


def test_a_certificate_that_cannot_serve_is_refused(pem, tmp_path):
    check_tls(ServerConfig(**pem))
    for wrong in (
        {"tls_certificate": pem["tls_certificate"]},
        {"tls_key": pem["tls_key"]},
        pem | {"tls_key": str(tmp_path / "none")},
        pem | {"tls_key": pem["tls_certificate"]},
    ):
        with pytest.raises(ConfigError):
            check_tls(ServerConfig(**wrong))


def test_https_is_served_with_a_key_to_who_trusts_the_certificate(pem, tiny):
    config = ServerConfig(port=0, api_key="one", **pem)
    body = {"prompt": "Call me", "max_tokens": 3}
    with running(str(tiny), config) as service:
        ours = RunningService(service.url, 0, "one", pem["tls_certificate"])
        assert complete(ours, body, lambda piece: None).completion_tokens == 3
        assert get(replace(ours, token="owner"), "/status")["model"] == "tiny"
        with pytest.raises(DisaggError, match="API key is missing"):
            get(replace(ours, token=""), "/status")
        with pytest.raises(
            PeerLostError, match=r"CERTIFICATE_VERIFY_FAILED.*\); SSL_CERT_FILE"
        ):
            get(replace(ours, certificate=None), "/status")
        with pytest.raises(PeerLostError, match=r"does it speak https\?"):
            get(replace(ours, url=service.url.replace("https", "http")), "/status")
        trusting = httpx.Client(verify=False)
        how = {"api_key": "wrong", "http_client": trusting, "max_retries": 0}
        client = openai.OpenAI(base_url=f"{service.url}/v1", **how)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert client.with_options(api_key="one").models.list().data[0].id == "tiny"
        client.close()
