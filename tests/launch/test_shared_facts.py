"""Front ends of one cluster name share their secrets through Ray."""

from disagg.launch.shared_facts import SharedFacts
from disagg.transfer.security import Authority


def test_the_next_front_end_finds_the_secrets_of_the_first(key_values):
    first = SharedFacts("mine").authority("tls")

    assert first.certificate
    assert SharedFacts("mine").authority("tls") == first


def test_without_tls_only_the_token_is_used(key_values):
    first = SharedFacts("mine").authority("tls")

    assert SharedFacts("mine").authority("token") == Authority(first.token)


def test_another_cluster_name_has_secrets_of_its_own(key_values):
    first = SharedFacts("mine").authority("token")

    assert SharedFacts("other").authority("token").token != first.token
