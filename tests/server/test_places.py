"""Where a server may listen, and that TLS and tokens do what they are for."""

from __future__ import annotations

import os
import socket
import ssl
from contextlib import closing, suppress
from http.client import HTTPSConnection
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qkvault.cli.app import app
from qkvault.config import load
from qkvault.connecting import default_address
from qkvault.errors import ConfigError, QKVaultError, Unavailable, Unwelcome
from qkvault.logs import RateLimited, get_logger
from qkvault.server.places import http_place, require_servable, require_sound, server_tls, store_places
from qkvault.testing.transport_contract import WAIT_SECONDS, find, read, save, until

SAFE = {"tls_cert_path": "/c", "tls_key_path": "/k", "token": "geheim"}
HEALTH = b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n"


def config_of(**settings):
    return load(env={}, cli=settings).config


def ask_health(where, certificate):
    context = ssl.create_default_context(cafile=certificate[0])
    with (
        closing(socket.create_connection(where, WAIT_SECONDS)) as plain,
        closing(context.wrap_socket(plain, server_hostname="127.0.0.1")) as secured,
    ):
        secured.sendall(HEALTH)
        return secured.recv(65536)


def is_answered(where, certificate):
    try:
        return ask_health(where, certificate) != b""
    except OSError:
        return False


def is_cut_off(plain):
    """Whether the server closes it, whatever it says before."""
    with closing(plain):
        try:
            while plain.recv(4096):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
    return True


class TestRules:
    def test_without_a_word_it_is_where_clients_look(self, monkeypatch, tmp_path):
        """B208: `listen`, then `address`, then the runtime directory."""
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        assert [str(place) for place in store_places(config_of())] == [default_address()]
        assert [str(place) for place in store_places(config_of(address="unix:///a"))] == ["unix:///a"]
        both = config_of(address="unix:///a", listen="unix:///b, tcp://127.0.0.1:0")
        assert [str(place) for place in store_places(both)] == ["unix:///b", "tcp://127.0.0.1:0"]

    @pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "[::]", "host.example"])
    @pytest.mark.parametrize("missing", list(SAFE))
    def test_what_others_reach_needs_tls_and_a_token(self, host, missing):
        """B208: an address other than loopback is refused without any of the three, over HTTP too."""
        settings = {name: value for name, value in SAFE.items() if name != missing}
        with pytest.raises(ConfigError, match=f"{missing} is not set"):
            store_places(config_of(listen=f"unix:///s,tcp://{host}:1", **settings))
        with pytest.raises(ConfigError, match="or set insecure"):
            http_place(config_of(http=f"{host}:1", **settings))

    @pytest.mark.parametrize("settings", [SAFE, {"insecure": True}])
    def test_with_them_or_on_request_it_may(self, settings):
        """B208: `insecure` says that one knows."""
        assert store_places(config_of(listen="tcp://0.0.0.0:1", **settings))[0].port == 1
        assert http_place(config_of(http="0.0.0.0:1", **settings)).port == 1

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "[::1]", "localhost"])
    def test_loopback_needs_nothing(self, host):
        """B208: nor does a Unix socket."""
        assert store_places(config_of(listen=f"tcp://{host}:1"))
        assert http_place(config_of(http=f"{host}:1"))

    @pytest.mark.parametrize(
        ("settings", "why"),
        [
            ({"tls_cert_path": "/c"}, "tls_key_path is not"),
            ({"tls_key_path": "/k"}, "tls_cert_path is not"),
            ({"tls_cert_path": "/c", "tls_key_path": "/k"}, "nothing listens on TCP"),
        ],
    )
    def test_settings_that_contradict_each_other_are_refused(self, settings, why):
        """B208: half of a pair, and a certificate that nobody would see."""
        config = config_of(listen="unix:///s", **settings)
        with pytest.raises(ConfigError, match=why):
            require_sound(config, store_places(config))

    @pytest.mark.parametrize("path", ["file", "file/below", "link"])
    def test_a_disk_path_that_is_no_directory_is_refused(self, tmp_path, path):
        """B541: before anything is made."""
        (tmp_path / "file").write_text("")
        (tmp_path / "link").symlink_to("nowhere")
        with pytest.raises(ConfigError, match="no directory that this user can write to"):
            require_servable(config_of(disk_path=str(tmp_path / path)))

    def test_a_disk_path_that_may_not_be_written_to_is_refused(self, tmp_path, monkeypatch):
        """B541: unless it was ours before: a disk may have become read-only."""
        monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and Path(path).exists())
        with pytest.raises(ConfigError, match=f"{tmp_path} is no directory that this user can write to"):
            require_servable(config_of(disk_path=str(tmp_path / "new")))
        (tmp_path / ".lock").touch()
        require_servable(config_of(disk_path=str(tmp_path)))

    def test_a_server_may_answer_at_the_address_of_its_clients(self):
        """B541: with a certificate that they see; by itself an address of another machine is nobody's fault."""
        require_servable(config_of(address="tcp://192.0.2.1:9400"))
        with pytest.raises(ConfigError, match="tls_cert_path='/c'"):
            require_servable(config_of(address="tcp://192.0.2.1:9400", **SAFE))
        with pytest.raises(ConfigError, match="nothing listens on TCP"):
            require_servable(config_of(**SAFE))

    @pytest.mark.parametrize("listen", ["unix://s", "tcp://127.0.0.1", "/s", "unix:///s,unix:///s"])
    def test_an_address_that_cannot_be_is_refused(self, listen):
        """B208: also one that is named twice."""
        with pytest.raises(ConfigError):
            store_places(config_of(listen=listen))

    @pytest.mark.parametrize("http", ["here", "127.0.0.1", "http://127.0.0.1:1", "127.0.0.1:99999", "unix://h"])
    def test_a_place_for_http_that_cannot_be_is_refused(self, http):
        """B208: with what is expected."""
        with pytest.raises(ConfigError, match="expected host:port"):
            http_place(config_of(http=http))

    def test_a_certificate_that_cannot_be_used_is_refused(self, certificate, tmp_path):
        """B209: not there, no certificate, another's key."""
        cert, key = certificate
        (tmp_path / "no").write_text("no")
        for pair in [("/nowhere", key), (cert, "/nowhere"), (cert, str(tmp_path / "no")), (cert, cert)]:
            with pytest.raises(ConfigError, match="tls_cert_path"):
                server_tls(config_of(tls_cert_path=pair[0], tls_key_path=pair[1]))


class TestTls:
    @pytest.fixture
    def server(self, make_server, certificate):
        cert, key = certificate
        return make_server(
            listen="tcp://127.0.0.1:0", tls_cert_path=cert, tls_key_path=key, token="geheim", http="127.0.0.1:0"
        )

    @pytest.fixture
    def where(self, server):
        """Host and port of its pages."""
        return "127.0.0.1", int(server.http_address.rpartition(":")[2])

    def test_a_prompt_goes_there_and_back(self, server, connect, certificate):
        """B209: through TLS, for who has the certificate and the token."""
        (address,) = server.addresses
        client = connect(address, token="geheim", tls_ca_path=certificate[0])
        assert save(client, "aabb") == 2
        other = connect(address, token="geheim", tls_ca_path=certificate[0])
        assert read(other, find(other, "aabb"), "aabb") == 64

    def test_a_server_that_listens_everywhere_is_found_with_its_own_file(self, make_server, certificate, tmp_path):
        """B555: by the health check of a container, through TLS and with the token."""
        with socket.create_server(("127.0.0.1", 0)) as plain:
            port = plain.getsockname()[1]
        cert, key = certificate
        place = f"tcp://0.0.0.0:{port}"
        settings = {"listen": place, "tls_cert_path": cert, "tls_key_path": key, "tls_ca_path": cert, "token": "geheim"}
        make_server(**settings)
        file = tmp_path / "settings.yaml"
        file.write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
        done = CliRunner().invoke(app, ["status", "--file", str(file)])
        assert done.exit_code == 0, done.output

    @pytest.mark.parametrize("token", ["", "no", "geheim2"])
    def test_a_wrong_token_is_refused(self, server, connect, certificate, token):
        """B209: before anything else is answered."""
        with pytest.raises(QKVaultError, match="token"):
            connect(server.addresses[0], token=token, tls_ca_path=certificate[0])

    def test_a_client_without_tls_gets_nowhere(self, server, connect):
        """B209, B556: it is told what to set, not kept waiting, nor to start a server; by the commands too."""
        (address,) = server.addresses
        with pytest.raises(Unwelcome, match=f"listens at {address} hung up.*if it wants TLS, set tls_ca_path"):
            connect(address, token="geheim", timeout_seconds=2.0)
        for command in ("status", "doctor"):
            done = CliRunner().invoke(app, [command, "--address", address])
            said = done.output + str(done.exception)
            assert done.exit_code
            assert "set tls_ca_path" in said
            assert "start one" not in said

    def test_a_client_with_tls_is_told_that_a_server_may_speak_none(self, make_server, connect, certificate):
        """B556: not that none answers."""
        (address,) = make_server(listen="tcp://127.0.0.1:0").addresses
        with pytest.raises(Unwelcome, match=f"listens at {address} hung up.*if it speaks no TLS, unset tls_ca_path"):
            connect(address, tls_ca_path=certificate[0])

    def test_a_certificate_of_another_is_named_as_such(self, make_server, connect, certificate):
        """B556: it names another address; the setting that is to have the right one is told."""
        cert, key = certificate
        (address,) = make_server(listen="tcp://127.0.0.2:0", tls_cert_path=cert, tls_key_path=key).addresses
        with pytest.raises(Unwelcome, match=f"not the certificate of {address}.*set tls_ca_path"):
            connect(address, tls_ca_path=cert)

    @pytest.fixture
    def logged(self, monkeypatch, caplog):
        """Lines that tell of refused tokens, as if none had been refused before."""
        for module in ("qkvault.wire.connection", "qkvault.server.app"):
            monkeypatch.setattr(f"{module}._limited", RateLimited(get_logger(module.removeprefix("qkvault."))))
        return lambda: [line for line in caplog.messages if "token_refused" in line]

    def test_tokens_that_are_refused_are_logged(self, server, connect, certificate, where, logged):
        """B557: by the store's door and by the pages', once a minute, and not what was given."""
        tls = ssl.create_default_context(cafile=certificate[0])
        for _ in range(2):
            with pytest.raises(Unwelcome):
                connect(server.addresses[0], token="falsch", tls_ca_path=certificate[0])
            with closing(HTTPSConnection(*where, context=tls)) as asking:
                asking.request("POST", "/clear", headers={"Authorization": "Bearer falsch"})
                assert asking.getresponse().status == 401
        assert [("127.0.0.1" in line, "falsch" in line) for line in logged()] == [(True, False)] * 2

    def test_a_server_that_cannot_prove_itself_gets_no_token(self, connect, certificate):
        """B209: a client with a certificate speaks to nobody else."""
        with socket.create_server(("127.0.0.1", 0)) as plain:
            address = f"tcp://127.0.0.1:{plain.getsockname()[1]}"
            with pytest.raises(Unavailable):
                connect(address, token="geheim", tls_ca_path=certificate[0], timeout_seconds=0.3)
            with closing(plain.accept()[0]) as received:
                assert b"geheim" not in received.recv(65536)

    def test_a_file_that_is_no_certificate_is_a_wrong_setting(self, server, connect):
        """B209: named as such."""
        with pytest.raises(ConfigError, match="tls_ca_path"):
            connect(server.addresses[0], tls_ca_path="/nowhere")

    def test_the_pages_speak_tls_too(self, server, certificate, where):
        """B209: one certificate for all that listens on TCP."""
        assert server.http_address.startswith("https://127.0.0.1:")
        assert ask_health(where, certificate).startswith(b"HTTP/1.1 200")

    def test_a_page_may_be_asked_for_with_the_end_of_the_handshake(self, where, certificate):
        """It is answered through TLS, and once."""
        received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = ssl.create_default_context(cafile=certificate[0]).wrap_bio(received, sent, server_hostname="127.0.0.1")
        with closing(socket.create_connection(where, WAIT_SECONDS)) as plain:
            with pytest.raises(ssl.SSLWantReadError):
                tls.do_handshake()
            plain.sendall(sent.read())
            while tls.version() is None or sent.pending == 0:
                received.write(plain.recv(65536))
                with suppress(ssl.SSLWantReadError):
                    tls.do_handshake()
            tls.write(HEALTH)
            plain.sendall(sent.read())
            answer = b""
            while b"ok" not in answer:
                received.write(plain.recv(65536))
                with suppress(ssl.SSLWantReadError):
                    while record := tls.read(65536):
                        answer += record
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.count(b"HTTP/1.1") == 1

    @pytest.mark.parametrize("said", [b"", b"GET /healthz HTTP/1.0\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"])
    def test_connections_that_never_finish_the_handshake_are_cut_off(self, where, certificate, monkeypatch, said):
        """B512: as those without TLS that ask for nothing."""
        monkeypatch.setattr("qkvault.server.http._ASK_SECONDS", 0.3)
        silent = [socket.create_connection(where, WAIT_SECONDS) for _ in range(3)]
        for plain in silent:
            plain.sendall(said)
        for plain in silent:
            assert is_cut_off(plain)
        monkeypatch.undo()
        assert ask_health(where, certificate).startswith(b"HTTP/1.1 200")

    def test_connections_that_never_begin_the_handshake_are_counted(self, where, certificate):
        """B512: what is one too many is closed at once."""
        many = [socket.create_connection(where, WAIT_SECONDS) for _ in range(80)]
        assert all(is_cut_off(plain) for plain in many[64:])
        for plain in many:
            plain.close()
        until(lambda: is_answered(where, certificate))
