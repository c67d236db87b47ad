"""A cluster whose processes speak TLS is asked in TLS: servers with certificates on loopback, no Ray."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
import trustme

from orchestrator.errors import RunError
from orchestrator.launch.answers import silent_nodes
from orchestrator.launch.knock import knock


class Anything(grpc.GenericRpcHandler):
    """Answers every question."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def head(authority: trustme.CA) -> Iterator[str]:
    """What answers in a cluster of Ray with RAY_USE_TLS=1: it asks for a certificate of the same authority as well."""
    own = authority.issue_cert("127.0.0.1")
    certificate = b"".join(blob.bytes() for blob in own.cert_chain_pems)
    pair = (own.private_key_pem.bytes(), certificate)
    credentials = grpc.ssl_server_credentials([pair], authority.cert_pem.bytes(), require_client_auth=True)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Anything(),))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def use(monkeypatch: pytest.MonkeyPatch, folder: Path, authority: trustme.CA) -> None:
    """Ray's variables with certificates of an authority."""
    own = authority.issue_cert("127.0.0.1")
    files = {
        "RAY_TLS_SERVER_CERT": own.cert_chain_pems[0],
        "RAY_TLS_SERVER_KEY": own.private_key_pem,
        "RAY_TLS_CA_CERT": authority.cert_pem,
    }
    monkeypatch.setenv("RAY_USE_TLS", "1")
    for name, blob in files.items():
        blob.write_to_path(folder / name)
        monkeypatch.setenv(name, str(folder / name))


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_USE_TLS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def refusal(address: str) -> str:
    with pytest.raises(RunError) as caught:
        knock(address)
    (problem,) = caught.value.problems
    return f"{problem.message} {problem.fix}"


def test_with_the_clusters_certificates_it_answers(
    head: str, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tmp_path, authority)
    knock(head)
    assert silent_nodes({"node": head}) == frozenset()


def test_without_them_the_refusal_names_what_to_set(head: str) -> None:
    assert "RAY_USE_TLS=1" in refusal(head)


def test_certificates_of_another_authority_are_refused_with_what_is_needed(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tmp_path, trustme.CA())
    assert "the same authority" in refusal(head)


def test_certificates_that_cannot_be_read_are_named(
    head: str, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tmp_path, authority)
    monkeypatch.setenv("RAY_TLS_CA_CERT", str(tmp_path / "absent.pem"))
    monkeypatch.delenv("RAY_TLS_SERVER_KEY")
    said = refusal(head)
    assert "absent.pem" in said
    assert "RAY_TLS_SERVER_KEY=" in said
    assert "RAY_TLS_SERVER_CERT=" not in said
