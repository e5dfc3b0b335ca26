"""Secrets: a config and all that is made from it hold names; only the code that needs a value gets it."""

import json
from secrets import token_hex

import pytest
from omegaconf import OmegaConf

from asyncrl.config.load import ConfigError, load_config, to_yaml
from asyncrl.config.secrets import MissingSecret, hidden, redacted, revealed
from asyncrl.fully_async_main import main
from asyncrl.rollouter.actors import RollouterActor
from asyncrl.rollouter.rewards.base import Answer
from asyncrl.rollouter.rewards.pool import RewardPool
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.run.preflight import preflight
from asyncrl.sample_queue.messages import Holder
from asyncrl.types.prompts import Prompt
from tests.support.tiny import authorized, overrides

REQUIRED = ["model.path=ckpt", "reward.function=package.module:score"]


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", value := token_hex(16))
    return value


def problems(*more: str) -> list[str]:
    with pytest.raises(ConfigError) as e:
        load_config(None, [*REQUIRED, *more])
    return e.value.problems


def test_a_config_keeps_the_name_and_its_user_gets_the_value(tmp_path, token, capsys):
    (tmp_path / "c.yaml").write_text(
        """
model: {path: ckpt}
reward:
  function: package.module:score
  args:
    headers: {Authorization: "Bearer ${secret:JUDGE_TOKEN}"}
    deep: [1, ["${secret:JUDGE_TOKEN}:${ secret: JUDGE_TOKEN }"]]
    again: ${.headers.Authorization}
"""
    )
    more = ["rollout.agent_loop_args.key=${secret:JUDGE_TOKEN}", "rollout.engine.args.key=${reward.args.again}"]
    config = load_config(tmp_path / "c.yaml", more)
    named = "${secret:JUDGE_TOKEN}"
    assert config.reward.args == {
        "headers": {"Authorization": f"Bearer {named}"},
        "deep": [1, [f"{named}:{named}"]],
        "again": f"Bearer {named}",
    }
    assert config.rollout.agent_loop_args == {"key": named}
    assert config.rollout.engine.args == {"key": f"Bearer {named}"}
    assert revealed("reward.args", config.reward.args) == {
        "headers": {"Authorization": f"Bearer {token}"},
        "deep": [1, [f"{token}:{token}"]],
        "again": f"Bearer {token}",
    }
    (tmp_path / "saved.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "saved.yaml") == config
    assert main(["--config", str(tmp_path / "c.yaml"), "--print-config", *more]) == 0
    printed = capsys.readouterr().out
    assert named in printed
    assert token not in printed


def test_a_value_is_passed_on_as_it_is(monkeypatch):
    """Also one that looks like a name of a secret."""
    monkeypatch.setenv("ODD", value := "${secret:HOME} \\1 ${x}")
    assert revealed("reward.args", {"key": "${secret:ODD}"}) == {"key": value}


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (["name=${secret:JUDGE_TOKEN}"], "name"),
        (["run_dir=/runs/${secret:JUDGE_TOKEN}"], "run_dir"),
        (["rollout.n=${secret:JUDGE_TOKEN}"], "rollout.n"),
        (["rollout=${secret:JUDGE_TOKEN}"], "rollout"),
        (["rollout.stop_strings=['${secret:JUDGE_TOKEN}']"], "rollout.stop_strings"),
        (["model.overrides.a.b=${secret:JUDGE_TOKEN}"], "model.overrides.a.b"),
        (["reward.args=${secret:JUDGE_TOKEN}"], "reward.args"),
        (["reward.args.key=${secret:JUDGE_TOKEN}", "reporting.wandb.project=p-${reward.args.key}"],)
        + ("reporting.wandb.project",),
    ],
)
def test_a_secret_is_refused_where_its_name_would_be_used_as_the_value(token, more, key):
    problem, *_ = problems(*more)  # the default of run_dir contains the name
    assert problem.startswith(f"{key}: expected no secret, found ")
    holders = "reward.args, rollout.agent_loop_args, rollout.agent.args and rollout.engine.args"
    assert problem.endswith(f"only in values inside {holders}")
    assert token not in problem


@pytest.mark.parametrize("name", ["", "null", "9A", "A,B", "sk-live-0123", "a.b", "${name}-x"])
def test_what_is_no_name_of_a_variable_is_refused_and_not_repeated(name):
    """It may be the secret itself."""
    assert problems(f"reward.args.key=${{secret:{name}}}") == [
        "reward.args.key: ${secret:NAME}: expected the name of one environment variable (letters, digits and _), found "
        "something else"
    ]


@pytest.mark.parametrize(
    "name",
    ["OPENAI_API_KEY", "APIKEY", "AWS_SECRET_ACCESS_KEY_2", "HF_TOKEN", "GHTOKEN", "PGPASSWORD", "MY_PASSWD"]
    + ["DB_CREDENTIALS", "client_secret", "ACCESSKEY", "SSH_PASSPHRASE"],
)
def test_a_variable_that_looks_like_a_secret_is_not_written(monkeypatch, name):
    monkeypatch.setenv(name, value := token_hex(16))
    first, second, last = name[:3], name[3:5], name[5:]
    for more in (
        [f"reward.args.key=${{oc.env:{name}}}"],
        [f"reward.args.key=Bearer ${{oc.env:{name},none}}", "name=${reward.args.key}"],
        [f"reward.args={{key: ['${{oc.decode:${{oc.env:{name}}}}}']}}"],
        [f"name={second}", f"reward.args.key=${{oc.env:{first}${{name}}{last}}}"],
    ):
        (problem,) = problems(*more)
        assert f"{name} looks like the name of a secret, and ${{oc.env:{name}}} would be written to files" in problem
        assert f"use ${{secret:{name}}} in values inside reward.args, " in problem
        assert value not in problem


@pytest.mark.parametrize("name", ["MAX_TOKENS", "TOKENIZER", "MONKEY", "KEYBOARD", "MODEL_PATH", "HOME"])
def test_other_variables_are_read(monkeypatch, name):
    monkeypatch.setenv(name, "x")
    assert load_config(None, [*REQUIRED, f"name=${{oc.env:{name}}}"]).name == "x"


def test_other_users_of_omegaconf_are_not_affected(token):
    load_config(None, REQUIRED)
    assert OmegaConf.create({"a": "${oc.env:JUDGE_TOKEN}"}).a == token
    assert not OmegaConf.has_resolver("secret")


@pytest.mark.parametrize("value", [None, ""])
def test_a_secret_that_is_not_set_is_refused_before_anything_starts(inputs, tmp_path, monkeypatch, capfd, value):
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_TOKEN", value)
    options = [*overrides(inputs, tmp_path / "run"), *authorized("JUDGE_TOKEN", "t"), "rollout.engine.device=cpu"]
    assert main(options) == 2
    expected = "config: {}: ${{secret:JUDGE_TOKEN}} needs the environment variable JUDGE_TOKEN, which is not set on "
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    for line, option in zip(lines, ("reward.args", "rollout.agent_loop_args")):
        assert line.startswith(expected.format(option))
    assert not (tmp_path / "run").exists()


async def test_on_a_cluster_only_the_machines_that_use_a_secret_need_it(inputs, tmp_path, monkeypatch):
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    monkeypatch.setattr("asyncrl.rollouter.actors.never_interrupt", lambda: None)
    config = load_config(None, [*overrides(inputs, tmp_path / "run"), *authorized("JUDGE_TOKEN", "t")])
    preflight(config, cpus=None)
    actor = RollouterActor.__ray_metadata__.modified_class(
        config, "rollouter", PromptTokenizer.of(config), 40, None, {}, Holder(token=1)
    )
    with pytest.raises(MissingSecret, match=r"^rollout\.agent_loop_args: .* variable JUDGE_TOKEN, .*$"):
        await actor.start()
    with pytest.raises(MissingSecret, match=r"^reward\.args: .* variable JUDGE_TOKEN, .*$"):
        await RewardPool(config.reward).start()


async def test_a_reward_function_gets_the_value(token):
    config = load_config(None, [*REQUIRED, *authorized("JUDGE_TOKEN", token)])
    pool = RewardPool(config.reward)
    await pool.start()
    try:
        (result,) = await pool.score([Answer(Prompt("e0-0", "row", (), "2"), "22")])
    finally:
        await pool.close()
    assert (result.error, result.reward) == (None, 1.0)


def test_values_are_hidden_in_the_forms_in_which_a_program_prints_them(monkeypatch):
    monkeypatch.setenv("PEM", pem := '-----BEGIN-----\nMII"q\\é\n-----END-----')
    monkeypatch.setenv("PART", "MII")
    args = {"tls": {"key": "${secret:PEM}"}, "parts": ["${secret:PART}"]}
    shown = hidden(args)
    for printed in (pem, repr(pem), json.dumps(pem), f"Error in {pem.splitlines()[1]}"):
        assert "MII" not in redacted(printed, shown)
        assert "${secret:PEM}" in redacted(printed, shown)
    assert redacted("MII-x", shown) == "${secret:PART}-x"
    assert redacted("nothing", shown) == "nothing"
    monkeypatch.setenv("PEM", '{\n"key": "MII"\n}')
    assert redacted("{}", hidden(args)) == "{}"
