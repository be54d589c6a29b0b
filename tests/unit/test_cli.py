from pathlib import Path

import pytest

from epp import cli

GOOD = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
    weight: 2
  - pluginRef: max-score-picker
"""


def run(*argv: str) -> int:
    try:
        return cli.main(argv)
    except SystemExit as end:
        return int(end.code or 0)


def test_check_prints_the_effective_configuration_which_checks_again(tmp_path, capsys) -> None:
    (tmp_path / "config.yaml").write_text(GOOD)
    assert run("check", str(tmp_path / "config.yaml")) == 0
    effective = capsys.readouterr().out
    assert "weight: 2" in effective
    assert "metrics-data-source" in effective, "defaults are filled in"
    (tmp_path / "effective.yaml").write_text(effective)
    assert run("check", str(tmp_path / "effective.yaml")) == 0
    assert capsys.readouterr().out == effective


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (GOOD.replace("weight: 2", "wieght: 2"), "$.schedulingProfiles[0].plugins[0]"),
        (GOOD.replace("weight: 2", "weight: heavy"), "$.schedulingProfiles[0].plugins[0].weight"),
        (GOOD.replace("type: queue-scorer", "type: queue-scorr"), "$.plugins[0].type"),
        (GOOD.replace("type: queue-scorer", "type: precise-prefix-cache-scorer"), "$.plugins[0]"),
        ("[]", "$"),
        (GOOD + "featureGates: [flowControl]\n", "$.featureGates"),
    ],
)
def test_N02_check_says_which_key_is_wrong_and_exits_with_2(tmp_path, capsys, text, path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert run("check", str(tmp_path / "config.yaml")) == 2
    printed = capsys.readouterr()
    assert path in printed.err
    assert printed.out == ""
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--no-such-flag"],
        ["serve", "--grpc-prt=9002"],
        ["serve"],
        ["serve", "--endpoints", "10.0.0.1"],
        ["serve", "--endpoints", "10.0.0.1:8000", "--config-file", "missing.yaml"],
        ["serve", "--endpoints", "10.0.0.1:8000", "--pool-name", "p"],
        ["serve", "--endpoints=10.0.0.1:8000", "--secure-serving=perhaps"],
        ["serve", "--endpoints=10.0.0.1:8000", "--config-text", "kind: [}"],
        ["serve", "surplus"],
        ["check"],
        ["check", "missing.yaml"],
        ["envoy-config"],
        ["envoy-config", "--endpoints", "here"],
        ["envoy-config", "--endpoints", "10.0.0.1:8000", "--retries", "-1"],
        ["nonsense"],
        [],
    ],
    ids=lambda argv: " ".join(argv) or "nothing",
)
def test_what_cannot_run_exits_with_2_and_one_clear_line(capsys, argv) -> None:
    assert run(*argv) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("epp")
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err


def test_endpoints_from_two_places_are_refused(tmp_path, capsys) -> None:
    (tmp_path / "endpoints.yaml").write_text("endpoints: []\n")
    config = GOOD.replace(
        "plugins:\n- type: queue",
        f"plugins:\n- type: file-discovery\n  parameters: {{path: {tmp_path}/endpoints.yaml}}\n"
        "- type: queue",
        1,
    )
    config += "dataLayer: {discovery: {pluginRef: file-discovery}}\n"
    assert run("serve", "--endpoints=10.0.0.1:8000", "--config-text", config) == 2
    assert "both say where the endpoints are" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["serve"], ["check"], ["envoy-config"]])
def test_help_teaches_and_exits_with_0(capsys, command) -> None:
    assert run(*command, "--help") == 0
    assert len(capsys.readouterr().out) > 200


def test_the_documented_flags_are_in_the_help(capsys) -> None:
    run("serve", "--help")
    text = capsys.readouterr().out
    documented = Path("docs/flags.md").read_text().split("## Accepted without effect")[0]
    flags = [line.split("`")[1] for line in documented.splitlines() if line.startswith("| `--")]
    assert len(flags) > 15
    assert all(flag in text for flag in flags)
