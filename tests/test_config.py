import dataclasses
import functools
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import trl
from conftest import sft_trainer
from transformers import HfArgumentParser, TrainingArguments
from trl import SFTConfig, TrlParser

from self_healing import (
    ConfigurationError,
    HealingConfig,
    SelfHealingCallback,
    SelfHealingTrainer,
)


NAMES = [f.name for f in dataclasses.fields(HealingConfig)]
RECIPES = Path(__file__).parent.parent / "recipes"
HOST_CONFIGS = [
    TrainingArguments,
    trl.SFTConfig,
    trl.DPOConfig,
    trl.GRPOConfig,
    trl.KTOConfig,
    trl.RewardConfig,
    trl.RLOOConfig,
    trl.ModelConfig,
    trl.ScriptArguments,
]


def changes(config: HealingConfig) -> dict:
    """The settings of `config` that differ from the default."""
    default = HealingConfig().to_dict()
    return {name: value for name, value in config.to_dict().items() if value != default[name]}


def option_strings(parser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


class TestParsers:
    @pytest.fixture(params=[HfArgumentParser, TrlParser])
    def parse(self, request, tmp_path):
        """Parses a command line into a `HealingConfig`, next to an `SFTConfig`."""

        def parse(*args: str) -> HealingConfig:
            sft = ["--output_dir", str(tmp_path), "--report_to", "none", "--bf16", "False"]
            training_args, config = request.param((SFTConfig, HealingConfig)).parse_args_into_dataclasses(
                [*sft, *args], look_for_args_file=False
            )
            assert training_args.output_dir == str(tmp_path)
            return config

        return parse

    @pytest.fixture
    def parse_yaml(self, tmp_path):
        """Parses a YAML file and a command line with the `TrlParser`, next to an `SFTConfig`."""

        def parse_yaml(yaml: str, *args: str) -> HealingConfig:
            sft = f"output_dir: {tmp_path}\nreport_to: none\nbf16: false\n"
            path = write(tmp_path / "config.yaml", sft + yaml)
            return TrlParser((SFTConfig, HealingConfig)).parse_args_and_config(["--config", str(path), *args])[1]

        return parse_yaml

    def test_the_command_line_sets_every_kind_of_value(self, parse):
        config = parse(
            *("--on_nonfinite", "skip"),
            *("--nan_patience", "5"),
            *("--api_retry_base_delay", "0.5"),
            *("--healing_dir", "elsewhere"),
            *("--upload_healing_files", "true"),
        )
        assert changes(config) == {
            "on_nonfinite": "skip",
            "nan_patience": 5,
            "api_retry_base_delay": 0.5,
            "healing_dir": "elsewhere",
            "upload_healing_files": True,
        }

    def test_the_no_twin_switches_a_flag_off(self, parse):
        assert changes(parse("--no_snapshots")) == {"snapshots": False}

    def test_yaml_may_write_off_without_quotes(self, parse_yaml):
        config = parse_yaml("on_hang: off\nlauncher_restarts: yes\n")
        assert changes(config) == {"on_hang": "off", "launcher_restarts": "yes"}

    def test_the_command_line_overrides_yaml(self, parse_yaml):
        assert changes(parse_yaml("nan_patience: 5\n", "--nan_patience", "6")) == {"nan_patience": 6}

    def test_a_flag_wins_over_the_preset_even_where_it_is_the_default(self, parse):
        preset, flags = ["--healing_preset", "conservative"], ["--nan_patience", "3"]
        assert parse(*flags, *preset) == parse(*preset, *flags) == HealingConfig.conservative(nan_patience=3)

    @pytest.mark.parametrize("parser_class", [HfArgumentParser, TrlParser])
    def test_help_lists_every_option_once(self, parser_class):
        parser = parser_class((trl.ScriptArguments, SFTConfig, trl.ModelConfig, HealingConfig))
        assert [option for option, count in Counter(option_strings(parser)).items() if count > 1] == []
        listed = Counter(re.findall(r"^  (--\w+)", parser.format_help(), flags=re.MULTILINE))
        assert {name: listed[f"--{name}"] for name in NAMES} == dict.fromkeys(NAMES, 1)

    def test_no_option_collides_with_those_of_the_hosts(self):
        ours = set(option_strings(HfArgumentParser(HealingConfig, add_help=False)))
        for host_config in HOST_CONFIGS:
            assert ours & set(option_strings(HfArgumentParser(host_config, add_help=False))) == set(), host_config


class TestFields:
    def test_every_setting_has_a_help_text_that_argparse_can_format(self):
        for field in dataclasses.fields(HealingConfig):
            text = field.metadata["help"]
            assert text.endswith("."), field.name
            assert "%" not in text, field.name


class TestValidation:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("nan_patience", 0),
            ("max_skipped_fraction", 2),
            ("max_recovery_attempts", -1),
            ("grad_explosion_threshold", -1),
            ("zclip_ema_decay", 1.0),
            ("api_retry_max_delay", float("nan")),
        ],
    )
    def test_a_number_out_of_range_is_refused(self, name, value):
        with pytest.raises(ConfigurationError, match=f"`{name}` is {value} "):
            HealingConfig(**{name: value})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("on_nonfinite", "heall"),
            ("nan_patience", True),
            ("nan_patience", "3"),
            ("max_skipped_fraction", "0.5"),
            ("healing_dir", 3),
            ("healing_dir", " "),
        ],
    )
    def test_a_value_of_the_wrong_kind_is_refused(self, name, value):
        with pytest.raises(ConfigurationError, match=f"`{name}` is "):
            HealingConfig(**{name: value})

    def test_the_longest_wait_may_not_be_shorter_than_the_first(self):
        with pytest.raises(ConfigurationError, match=r"`api_retry_max_delay` is 0\.5, but must be at least"):
            HealingConfig(api_retry_max_delay=0.5)

    @pytest.mark.parametrize(
        ("name", "value", "kept"),
        [
            ("zclip_mode", False, "off"),
            ("launcher_restarts", True, "yes"),
        ],
    )
    def test_what_yaml_makes_of_a_word_is_that_word(self, name, value, kept):
        assert getattr(HealingConfig(**{name: value}), name) == kept
        assert getattr(HealingConfig.from_dict({name: value}), name) == kept

    def test_the_message_says_what_is_allowed_and_what_to_do(self):
        with pytest.raises(ConfigurationError) as error:
            HealingConfig(nan_patience="2")
        assert str(error.value) == (
            "`nan_patience` is '2' (str), but must be an integer, at least 1. Please change it, or leave it out for "
            "the default, 3."
        )

    def test_all_problems_are_named_at_once(self):
        with pytest.raises(ConfigurationError, match=r"2 settings cannot be used:\n- `nan_patience`.*\n- `snapshot_"):
            HealingConfig(nan_patience=0, snapshot_interval=-1)

    def test_a_config_cannot_be_changed_past_its_checks(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            HealingConfig().nan_patience = 0


class TestPresets:
    def test_a_misspelled_keyword_names_the_closest_setting(self):
        for make in (HealingConfig, functools.partial(dataclasses.replace, HealingConfig())):
            with pytest.raises(
                ConfigurationError, match=r"`nan_patiance` is not a setting[.] Did you mean `nan_patience`"
            ):
                make(nan_patiance=3)


class TestShown:
    def test_what_is_printed_is_what_was_set(self):
        assert str(HealingConfig()) == "HealingConfig()"
        config = HealingConfig.aggressive(nan_patience=2, healing_dir="out")
        assert repr(config) == "HealingConfig(healing_preset='aggressive', nan_patience=2, healing_dir='out')"

    def test_what_is_printed_makes_the_config_again(self):
        # The default of nan_patience, which the preset has changed.
        for config in (HealingConfig(), HealingConfig.aggressive(nan_patience=3, max_skipped_fraction=0.5)):
            assert eval(repr(config)) == config

    def test_a_notebook_shows_what_was_set_and_what_it_would_be(self):
        shown = HealingConfig.aggressive(nan_patience=2, healing_dir="<b>")._repr_html_()
        for row in (
            "<td>healing_preset</td><td>'aggressive'</td><td>'default'</td>",
            "<td>nan_patience</td><td>2</td><td>8</td>",
            "<td>healing_dir</td><td>'&lt;b&gt;'</td><td>None</td>",
        ):
            assert row in shown
        assert shown.count("<tr>") == 4


class TestPage:
    def test_the_settings_that_people_set_come_first_and_all_of_it_is_short(self):
        page = (RECIPES.parent / "docs" / "configuration.md").read_text(encoding="utf-8")
        first = ["healing_preset", "healing_dir", "nan_patience", "max_recovery_attempts", "on_bad_sample"]
        assert re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)[:5] == first
        assert len([word for word in page.split() if re.search("[A-Za-z0-9]", word)]) <= 1400


class TestDict:
    @pytest.mark.parametrize("config", [{"nan_patince": 5}, {"nonfinite": {"nan-patience": 5}}])
    def test_an_unknown_key_names_the_closest_one(self, config):
        with pytest.raises(ConfigurationError, match=r"Did you mean `nan_patience` in \[nonfinite\]"):
            HealingConfig.from_dict(config)

    def test_an_unknown_section_names_the_closest_one(self):
        with pytest.raises(ConfigurationError, match=r"\[recover\] is not a section. Did you mean \[recovery\]"):
            HealingConfig.from_dict({"recover": {"max_recovery_attempts": 9}})

    def test_the_wrong_section_names_the_right_one(self):
        with pytest.raises(ConfigurationError, match=r"`nan_patience` is in \[journal\].*belongs in \[nonfinite\]"):
            HealingConfig.from_dict({"journal": {"nan_patience": 5}})

    def test_a_key_given_flat_and_in_its_section_is_refused_even_if_equal(self):
        with pytest.raises(ConfigurationError, match="`nan_patience` is given twice"):
            HealingConfig.from_dict({"nan_patience": 5, "nonfinite": {"nan_patience": 5}})


class TestToml:
    @pytest.mark.parametrize(
        "config",
        [
            HealingConfig(),
            HealingConfig.aggressive(on_hang="off", launcher_restarts="yes", snapshots=False),
            HealingConfig.conservative(api_retry_base_delay=1e-7, max_skipped_fraction=0.1 + 0.2, nan_patience=10**6),
            *(
                HealingConfig(healing_dir=name)
                for name in ("'a' \"b\"", "back\\slash", "\u00e9\u2028\x7f\n\t", "#[x]=1")
            ),
        ],
    )
    def test_the_round_trip_is_exact(self, config, tmp_path):
        path = tmp_path / "round_trip.toml"
        text = config.to_toml(path)
        assert HealingConfig.from_toml(path) == config
        assert path.read_text(encoding="utf-8") == text

    @pytest.mark.parametrize(
        "line", ["nan_patience =", "nan_patience = ", "snapshots = True", 'healing_dir = "x', "[nonfinite]"]
    )
    def test_a_broken_file_is_named_with_its_line(self, line, tmp_path):
        path = write(tmp_path / "broken.toml", f"[nonfinite]\nmax_skipped_fraction = 0.5\n{line}")
        with pytest.raises(ConfigurationError, match=r"broken\.toml is not valid TOML: .*line 3,.* Please correct"):
            HealingConfig.from_toml(path)

    def test_a_missing_file_is_an_error(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"The settings in .*missing\.toml cannot be read: No such file"):
            HealingConfig.from_toml(tmp_path / "missing.toml")


class TestGiven:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ("aggressive", "Did you mean HealingConfig(healing_preset='aggressive')?"),
            (Path("healing.toml"), "did you mean HealingConfig.from_toml('healing.toml')?"),
            (np.zeros(2), "must be a HealingConfig or a dict of settings. Please leave it out"),
        ],
    )
    def test_what_is_no_config_says_what_was_meant(self, given, said, tmp_path, tokenizer):
        trainer = sft_trainer(tmp_path, tokenizer)
        for make in (SelfHealingCallback, lambda config: SelfHealingTrainer(trainer, config)):
            with pytest.raises(ConfigurationError, match=re.escape(said)):
                make(given)

    def test_a_model_in_the_place_of_a_trainer_is_named_by_its_class_alone(self):
        with pytest.raises(TypeError, match=r"wraps an existing trainer, but got a Linear\. Please build it first"):
            SelfHealingTrainer(torch.nn.Linear(2, 2))

    def test_each_wrapper_trains_with_its_own_and_says_what_changes(self, tmp_path, tokenizer, caplog):
        callback = SelfHealingCallback({"on_nonfinite": "raise"})
        trainer = sft_trainer(tmp_path, tokenizer, callbacks=[callback], max_steps=1)
        first = SelfHealingTrainer(trainer)
        assert not caplog.records
        SelfHealingTrainer(trainer, {"on_nonfinite": "skip", "nan_patience": 7})
        assert "on_nonfinite='skip' (was 'raise'), nan_patience=7 (was 3)." in caplog.text
        assert callback.config.on_nonfinite == "skip"
        caplog.clear()
        first.train()
        assert "on_nonfinite='raise' (was 'skip')" in caplog.text
        assert (callback.config, callback.run.config) == (first.config, first.config)

    def test_what_is_set_on_the_wrapper_is_set_on_the_trainer(self, tmp_path, tokenizer, monkeypatch):
        trainer = sft_trainer(tmp_path, tokenizer)
        healer = SelfHealingTrainer(trainer)
        healer.train_dataset = few = trainer.train_dataset.select(range(4))
        healer.of_my_callback = 1
        healer._train_batch_size = 2
        assert (trainer.train_dataset, trainer.of_my_callback, trainer._train_batch_size) == (few, 1, 2)
        with monkeypatch.context() as patch:
            patch.setattr(healer, "compute_loss", len)
            assert trainer.compute_loss is len
        assert trainer.compute_loss is not len
        healer.config = config = HealingConfig()
        assert healer.config is config
        assert not hasattr(trainer, "config")


class TestRecipes:
    @pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
    def test_a_recipe_is_read_at_a_glance(self, path):
        assert len([line for line in path.read_text().splitlines() if line]) <= 5

    @pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
    def test_a_recipe_has_no_setting_at_its_default(self, path):
        listed = re.findall(r"^(\w+) =", path.read_text(), flags=re.MULTILINE)
        given = HealingConfig.from_toml(path)
        preset = HealingConfig(healing_preset=given.healing_preset)
        assert all(name in changes(given) for name in listed), listed
        assert dataclasses.replace(preset, **{name: getattr(given, name) for name in listed}) == given
