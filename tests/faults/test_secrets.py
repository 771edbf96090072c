"""A secret of the environment: in no file of a run, and never on the terminal, whatever becomes of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpexp.errors import RefusedError
from ddpexp.system.secrets import (
    masked,
    masked_tree,
    referenced,
    resolved_references,
    secret_variables,
    unusable,
    with_references,
)
from tests.conftest import Done, finish
from tests.points import Recipe
from tests.refusals import command_refused

PLAIN = "q5zk7wyx"  # no digits of a hash, which would hold a shorter or a hexadecimal one by chance
CANARY = f'canary-"{PLAIN}\\0b9d'  # what JSON and Python quote differently is found all the same
CODE = """\
import warnings


def keyed(rows, token=None):
    assert rows or token == os.environ["TOKEN"]  # the recipe gets the value itself


class KeyedNet(Net):
    def __init__(self, token=None, **options):
        keyed((), token)
        super().__init__(**options)


class KeyedOptimizer(torch.optim.SGD):
    def __init__(self, parameters, token=None, **options):
        keyed((), token)
        super().__init__(parameters, **options)


def load_keyed(token=None, **options):
    keyed((), token)
    return load(**options)


class Keyed(Paced):
    def __init__(self, token=None, how="run"):
        keyed((), token)
        self.token, self.how = token, how

    def step(self, model, batch):
        if self.how == "warn":
            warnings.warn(f"no luck with {self.token}", RuntimeWarning)
        if self.how == "raise" and RANK == 1:
            raise ValueError({"token": self.token, "url": f"https://me:{self.token}@host/"})
        if self.how == "exit" and RANK == 1:
            sys.exit(f"no luck with {self.token}")
        loss, count, metrics = super().step(model, batch)
        return loss, count, {**metrics, self.token: metrics["accuracy"]} if self.how == "metric" else metrics
"""
ASKED = (
    "model._target_=points.KeyedNet", "+model.token=${oc.env:TOKEN}", "data._target_=points.load_keyed",
    "+data.token=${oc.env:TOKEN}", "optimizer._target_=points.KeyedOptimizer", "optimizer.lr=0.05",
    "+optimizer.token=${oc.env:TOKEN}", "task._target_=points.Keyed", "+task.token=${oc.env:TOKEN}",
    "logger=tensorboard",
    "trainer.gpus=2", "trainer.checkpoint_every=2",
)  # fmt: skip

RESTATED = [word.lstrip("+") for word in ASKED if "${" in word]


@pytest.fixture(scope="module")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a run prints and writes is tested: commands are forks."""
    return warm_environ


@pytest.fixture
def recipe(recipe: Recipe) -> Recipe:
    recipe.ddpexp.environ["TOKEN"] = CANARY
    with (recipe.folder / "points.py").open("a") as file:
        file.write(f"\n\n{CODE}")
    return recipe


def forms(canary: str) -> list[bytes]:
    """Return the ways in which the value may be written."""
    return [canary.encode(), json.dumps(canary)[1:-1].encode(), repr(canary)[1:-1].encode(), PLAIN.encode()]


def is_kept(done: Done, canary: str = CANARY) -> None:
    """Check that the value is in no file of the run, in no name of one, and not on the terminal."""
    shown = (done.out + done.err).encode()
    for form in forms(canary):
        assert form not in shown, shown
        for path in done.run.rglob("*"):
            assert form not in bytes(path), path
            assert not path.is_file() or form not in path.read_bytes(), path


def verb(recipe: Recipe, run: Path, *overrides: str, environ: dict[str, str] | None = None) -> Done:
    process, _ = recipe.ddpexp.start(*overrides, "--config-dir", str(recipe.folder / "conf"), environ=environ)
    return finish(process, run)


@pytest.mark.fault("S10")
@pytest.mark.parametrize(
    ("how", "code", "shows"),
    [
        ("raise", 1, "ValueError: {'token': '${TOKEN}', 'url': 'https://me:${TOKEN}@host/'}"),
        ("exit", 1, "no luck with ${TOKEN}"),
    ],
)
def test_a_run_that_fails_with_a_secret_in_its_error_does_not_leak_it(
    recipe: Recipe, how: str, code: int, shows: str
) -> None:
    done = recipe(*ASKED, f"+task.how={how}")
    assert done.code == code, done.err
    assert shows in done.err
    is_kept(done)
    assert "${oc.env:TOKEN}" in (done.run / "config.yaml").read_text()


@pytest.mark.fault("S10")
@pytest.mark.parametrize("how", ["warn", pytest.param("metric", marks=pytest.mark.slow)])
def test_a_run_its_interruption_its_resumption_and_its_evaluation_leak_no_secret(recipe: Recipe, how: str) -> None:
    asked = (*ASKED, f"+task.how={how}")
    environ = {"DDPEXP_FAULT": "backward:term:0:6", "PYTHONWARNINGS": "default"}
    done = recipe(*asked, "trainer.log_every=1", environ=environ)
    assert done.code == 143, done
    is_kept(done)
    assert all(f"'{word}'" in done.err.splitlines()[-1] for word in RESTATED), done.err
    for words in (RESTATED, ["run.trust=[points,oc.env:TOKEN]"]):
        done = verb(recipe, done.run, "resume", str(done.run), *words, environ={"PYTHONWARNINGS": "default"})
        assert done.code == 0, done
        is_kept(done)
        evaluated = verb(recipe, done.run, "evaluate", str(done.run), *words, environ={"PYTHONWARNINGS": "default"})
        assert evaluated.code == 0, evaluated
    is_kept(evaluated)
    if how == "metric":
        assert "${TOKEN}" in evaluated.out


@pytest.mark.fault("S10")
def test_a_value_that_the_shell_has_put_in_is_written_as_a_reference(recipe: Recipe) -> None:
    """`data.token=$TOKEN`; a value without quotes in it, which Hydra's grammar would want to have escaped."""
    canary = recipe.ddpexp.environ["TOKEN"] = f"canary-{PLAIN}-0b9d"
    arguments = [word.replace("${oc.env:TOKEN}", canary) for word in ASKED]
    done = recipe(*arguments, "trainer.max_steps=4")
    assert done.code == 0, done
    for key in ("model.token", "data.token", "optimizer.token", "task.token"):
        assert f"ddpexp: {key} is written as ${{oc.env:TOKEN}}: the value stays out of the run's files\n" in done.err
    is_kept(done, canary)
    assert yaml.safe_load((done.run / "config.yaml").read_text())["data"]["token"] == "${oc.env:TOKEN}"
    assert "+data.token=${oc.env:TOKEN}" in yaml.safe_load((done.run / "overrides.yaml").read_text())
    assert "+data.token=${oc.env:TOKEN}" in done.manifest()["command"]
    del recipe.ddpexp.environ["TOKEN"]
    for words, expected in (([], f"{done.run.name}: restated"), (RESTATED, "config.yaml: TOKEN is not set")):
        refused = verb(recipe, done.run, "resume", str(done.run), "trainer.max_steps=8", *words)
        command_refused(refused, expected)
        assert refused.err.count("\n") == 1
    recipe.ddpexp.environ["TOKEN"] = canary
    words = [word.replace("${oc.env:TOKEN}", canary) for word in RESTATED]
    longer = verb(recipe, done.run, "resume", str(done.run), "trainer.max_steps=8", *words)
    assert (longer.code, longer.result()["step"]) == (0, 8), longer
    is_kept(longer, canary)


@pytest.mark.fault("S10")
def test_a_refusal_that_shows_a_value_does_not_show_a_secret(recipe: Recipe) -> None:
    for overrides in (
        ["trainer.seed=${oc.env:TOKEN}"],
        ["model.hidden=${oc.env:TOKEN}"],
        ["trainer.precision=${oc.env:TOKEN}"],
    ):
        done = recipe(*overrides)
        command_refused(done, overrides[0].replace("oc.env:", ""))
        assert not done.run.exists()
        is_kept(done)


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("TOKEN", "abcdefgh", True),
        ("HF_TOKEN", "hf_abcdefgh", True),
        ("wandb_api_key", "0123456789abcdef", True),
        ("AWS_SECRET_ACCESS_KEY", "a/b+c/d+e/f", True),
        ("DB_PASSWORD_2", "correct horse", True),
        ("TOKEN", "/lZ8s0aQ9x", True),  # as base64 may begin
        ("TOKEN", "short", False),
        ("TOKEN", "123456789.5", False),
        ("SSH_AUTH_SOCK", "/tmp/ssh-x/agent.1", False),
        ("KEY_FILE", "~/key/file", False),
        ("KEYBOARD", "abcdefgh", False),
        ("MONKEY", "abcdefgh", False),
        ("PWD", "abcdefgh", False),
        ("HOSTNAME", "abcdefgh", False),
    ],
)
def test_what_looks_like_a_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str, secret: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "key").mkdir()
    value = value.replace("/tmp/ssh-x", str(tmp_path))
    assert secret_variables({name: value}) == ([(value, name)] if secret else [])


ANY = "q5zk7wyx-b9d"
HEX = "0123456789abcdef" * 4


@pytest.mark.fault("S10")
@pytest.mark.parametrize(
    "name",
    [
        "PGPASSWORD", "MYSQL_PWD", "MYSQLPWD", "GITHUB_PAT", "AZURE_DEVOPS_EXT_PAT", "SSHPASS", "DB_PASS", "DBPASS",
        "REDIS_AUTH",
        "OAUTH_SECRET", "AUTHTOKEN", "AUTHORIZATION", "APIKEY", "OPENAI_API_KEY", "OPENAIAPIKEY", "wandbApiKey",
        "dbPassword",
        "SECRETKEY", "AWS_ACCESS_KEY_ID", "SSH_PRIVATE_KEY", "SIGNING_KEY", "ENCRYPTIONKEY", "SENTRY_DSN",
        "CONNECTION_STRING",
        "AZURE_CONNSTR", "SESSION_COOKIE", "SLACK_WEBHOOK_URL", "JWT", "DJANGO_SALT", "DOCKER_CREDS", "GPG_PASSPHRASE",
        "PASSCODE",
        "my.token", "my-secret", "TOKENS_2", "DB_PASSWORD_FILE_CONTENT", "HF_TOKEN",
    ],
)  # fmt: skip
def test_names_of_secrets_are_known_in_all_their_forms(name: str) -> None:
    assert secret_variables({name: ANY}) == [(ANY, name)]


@pytest.mark.fault("S10")
@pytest.mark.parametrize(
    "name",
    [
        "KEYBOARD", "KEYMAP", "MONKEY", "TURKEY", "HOTKEYS", "PASSENGERS", "PASSPORT", "BYPASS_RULE", "PASSAGE",
        "AUTHOR",
        "GIT_AUTHOR_NAME", "AUTHORITY", "TOKENIZERS_PARALLELISM",
        "TOKENIZER", "TOKENIZER_NAME", "SECRETARY", "PWD", "OLDPWD", "PATH",
        "PATTERN", "PATIENCE", "SALTED", "DESCRIPTION", "PASSWORDLESS_LOGIN", "HOSTNAME", "DSNAME", "COMPAT_MODE",
        "OTPION",
        "DATABASE_URL", "RECIPE",
    ],
)  # fmt: skip
def test_ordinary_names_are_none_of_secrets(name: str) -> None:
    assert secret_variables({name: ANY}) == []


@pytest.mark.fault("S10")
@pytest.mark.parametrize(
    "value",
    [
        f"ghp_{HEX[:36]}", f"gho_{HEX[:36]}",
        f"github_pat_{HEX[:22]}_{HEX[:59]}", "glpat-abcdEFGH0123456789-_", "AKIAABCDEFGHIJKLMNOP",
        "hf_" + "aBcDeFgHiJ" * 3, "sk-proj-abcdEFGH0123456789-_abc", "sk_live_abcdEFGH01234567",
        "xoxb-1234567890-abcdEFGH",
        "npm_" + HEX[:36], "AIza" + HEX[:35],
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdEFGH-_", "dapi" + HEX[:32], "hvs." + HEX[:24],
        HEX[:40],
        "postgres://me:correct-horse@host:5432/data?sslmode=require",
        "https://x.blob.core.windows.net/c?sv=2&sig=abc%3D",
        "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=abcdEFGH0123==;EndpointSuffix=x",
        "-----BEGIN PRIVATE KEY-----\nMIIE",
    ],
)  # fmt: skip
def test_what_a_well_known_service_has_issued_is_a_secret_under_any_name(value: str) -> None:
    assert secret_variables({"ANY_NAME": value}) == [(value, "ANY_NAME")]


@pytest.mark.fault("S10")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GITHUB_SHA", HEX[:40]), ("CI_COMMIT", HEX[:40]), ("DATABASE_URL", "postgres://me@host:5432/data"),
        ("URL", "https://host:8080/@me:x"), ("ANY_NAME", "sk-learn"), ("ANY_NAME", "ghp_short"), ("ANY_NAME", HEX[:39]),
        ("ANY_NAME", "hf_internal_testing"), ("AUTH_MODE", "required"), ("KRB_AUTH", "Kerberos"), ("LR", "0.001"),
    ],
)  # fmt: skip
def test_what_only_resembles_one_is_none(name: str, value: str) -> None:
    assert secret_variables({name: value}) == []


@pytest.mark.fault("S10")
def test_of_a_url_its_password_is_hidden_alone_too_and_the_override_becomes_a_reference_to_all_of_it() -> None:
    url = "postgres://me:correct-horse@host/data"
    environ = {"DATABASE_URL": url}
    shown = masked(f"cannot reach {url}; tried correct-horse at postgres://me@host/data", environ)
    assert shown == "cannot reach ${DATABASE_URL}; tried ${DATABASE_URL} at postgres://me@host/data"
    assert referenced([f"data.url={url}"], environ)[0] == ["data.url=${oc.env:DATABASE_URL}"]


@pytest.mark.fault("S10")
def test_further_names_are_listed_in_the_environment() -> None:
    environ = {
        "DDPEXP_SECRETS": "PROJECT, CORP_*",
        "PROJECT": "moon",
        "CORP_HOST": "10.0.0.7",
        "CORP_ID": "42",
        "OTHER": "open sesame",
    }
    assert masked("moon 10.0.0.7 42 open sesame", environ) == "${PROJECT} ${CORP_HOST} 42 open sesame"
    assert unusable(environ) is None


@pytest.mark.fault("S10")
@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ("A B", "'A B'"), ("A,=x", "'=x'"), ("*", "'*'"), ("PROJECT", "fewer than 4 characters"),
    ],
)  # fmt: skip
def test_a_list_of_names_that_cannot_be_meant_is_refused_at_once(recipe: Recipe, listed: str, said: str) -> None:
    done = recipe(environ={"DDPEXP_SECRETS": listed, "PROJECT": "abc"})
    command_refused(done, f"DDPEXP_SECRETS={listed}: {said}")
    assert not done.run.exists()


@pytest.mark.fault("S10")
def test_a_password_of_a_database_and_a_listed_value_are_in_no_file_of_a_run(recipe: Recipe) -> None:
    canaries = {
        "PGPASSWORD": f"{PLAIN}-one",
        "MY_URL": f"postgres://me:{PLAIN}-two@host/data",
        "LISTED": f"{PLAIN}-three",
    }
    recipe.ddpexp.environ |= {**canaries, "DDPEXP_SECRETS": "LIST*", "TOKEN": "any-token-at-all"}
    with (recipe.folder / "points.py").open("a") as file:
        file.write("\n\nclass Named(Sides):\n    def __init__(self, **names):\n        self.names = names\n")
    arguments = [f"+task.{name.lower()}={value}" for name, value in canaries.items() if name != "MY_URL"]
    url = f"+task.my_url='{canaries['MY_URL']}'"
    done = recipe("task._target_=points.Named", *arguments, url, "logger=tensorboard", "trainer.max_steps=2")
    assert done.code == 0, done
    for canary in canaries.values():
        is_kept(done, canary)


def test_the_longer_of_two_secrets_is_masked_first() -> None:
    environ = {"A_KEY": "abcdefgh", "B_KEY": "abcdefgh-ijkl"}
    assert masked("x abcdefgh-ijkl abcdefgh", environ) == "x ${B_KEY} ${A_KEY}"


def test_a_tree_is_masked_with_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "abcdefgh")
    tree = {"abcdefgh": [1, None, ("x abcdefgh", 2.5)], 3: True}
    assert masked_tree(tree) == {"${A_KEY}": [1, None, ["x ${A_KEY}", 2.5]], 3: True}


def test_only_values_of_overrides_become_references() -> None:
    environ = {"A_KEY": "abcdefgh"}
    command = ["resume", "runs/abcdefgh", "+data.url=https://me:abcdefgh@host", "--config-dir=abcdefgh", "model.x=1"]
    changed, said = referenced(command, environ)
    assert changed == [*command[:2], "+data.url=https://me:${oc.env:A_KEY}@host", *command[3:]]
    assert said == ["data.url is written as ${oc.env:A_KEY}"]


@pytest.mark.fault("S10")
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a'b c-d\"e", "x='a''b c-d\"e'"), ("a'b c-d\"e", "x='a'\"'\"'b c-d\"e'"), ("a'b c-d\"e", "x=a%27b%20c-d%22e"),
        ("a'b c-d\"e", "x=a%27b+c-d%22e"), ("a'b c-d\"e", "x=a&#x27;b c-d&quot;e"), ("gr\u00fcn-gr\u00fcn", r"x=gr\u00fcn-gr\u00fcn"),
        ("tab\there-x", r"x=tab\there-x"), ("back\\slash-x", r"x=back\\slash-x"),
    ],
)  # fmt: skip
def test_a_secret_is_masked_as_yaml_shells_urls_html_and_json_write_it(value: str, shown: str) -> None:
    assert masked(shown, {"MY_TOKEN": value}).replace("'", "") == "x=${MY_TOKEN}"


@pytest.mark.fault("S10")
def test_the_lines_of_a_private_key_are_masked_alone_too() -> None:
    key = "-----BEGIN PRIVATE KEY-----\nMIIEabcdEFGH0123456789\nabcdEFGH0123456789MIIE\n-----END PRIVATE KEY-----"
    diff = "\n".join(f"+    {line}" for line in key.splitlines())
    shown = masked(diff, {"DEPLOY": key}).splitlines()
    assert shown[1:3] == ["+    ${DEPLOY}", "+    ${DEPLOY}"]


@pytest.mark.fault("S10")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("git clone https://x-access-token:ghs_1@host/a.git", "git clone https://x-access-token:***@host/a.git"),
        ("s3://key:pass/word", "s3://key:pass/word"), ("http://host:8080/a@b", "http://host:8080/a@b"),
        ("see https://host/a?x=1&token=abc&y=2", "see https://host/a?x=1&token=***&y=2"),
        ("https://me:${TOKEN}@host https://host?sig=${TOKEN}", "https://me:${TOKEN}@host https://host?sig=${TOKEN}"),
    ],
)  # fmt: skip
def test_a_password_in_any_url_is_masked(text: str, shown: str) -> None:
    assert masked(text, {}) == shown
    assert masked(masked(text, {}), {}) == shown


@pytest.mark.fault("S10")
def test_a_reference_stays_one_although_its_name_is_the_secret() -> None:
    environ = {"DB_PASSWORD": "PASSWORD"}
    assert masked("PASSWORD ${DB_PASSWORD} ${oc.env:DB_PASSWORD}", environ) == (
        "${DB_PASSWORD} ${DB_PASSWORD} ${oc.env:DB_PASSWORD}"
    )
    assert with_references("a PASSWORD ${oc.env:DB_PASSWORD}", environ) == (
        "a ${oc.env:DB_PASSWORD} ${oc.env:DB_PASSWORD}"
    )


@pytest.mark.fault("S10")
def test_what_becomes_secret_while_a_process_runs_is_masked_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert masked("late-4711-late") == "late-4711-late"
    monkeypatch.setenv("LATE_TOKEN", "late-4711-late")
    assert masked("late-4711-late") == "${LATE_TOKEN}"
    monkeypatch.delenv("LATE_TOKEN")
    assert masked("late-4711-late") == "late-4711-late"


@pytest.mark.fault("S10")
def test_in_a_configuration_secrets_become_references_or_are_refused() -> None:
    environ = {"A_KEY": "abcdefgh", "DATA_URL": "postgres://me:correct-horse@host/data"}
    tree = {"a": ["/x/abcdefgh/y", 3, None], "b": {"c": "postgres://me:correct-horse@host/data", "d": "\\abcdefgh"}}
    made: Any = with_references(tree, environ)
    assert made == {
        "a": ["/x/${oc.env:A_KEY}/y", 3, None],
        "b": {"c": "${oc.env:DATA_URL}", "d": "\\\\${oc.env:A_KEY}"},
    }
    assert resolved_references(made["a"][0], environ) == "/x/abcdefgh/y"
    for refused, sentence in (
        ({"data": {"abcdefgh": 1}}, "The key data.${A_KEY} holds the value of A_KEY"),
        ({"data": ["correct-horse"]}, "data[0]=${DATA_URL} holds the value of DATA_URL"),
        ({"data": {"url": "ftp://a:b@c"}}, "data.url=ftp://a:***@c holds a password in a URL"),
    ):
        with pytest.raises(RefusedError) as caught:
            with_references(refused, environ)
        assert sentence in str(caught.value)
