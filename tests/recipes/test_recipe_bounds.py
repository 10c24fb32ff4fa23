"""A hostile recipe ends as one error: in bounded memory and time, with nothing read outside of its folder and
no text of other files in a message."""

import json
import os
from pathlib import Path

import pytest

from megatron_ds.compat.recipes.check import main
from megatron_ds.compat.recipes.file import read_recipe
from megatron_ds.compat.recipes.verdict import Kind, assess
from megatron_ds.errors import ConfigError
from tests.harness.limits import bounded

pytestmark = [pytest.mark.plan, pytest.mark.one_in(2)]

TRAIN = "\ntorchrun pretrain_gpt.py --num-layers 2 --hidden-size 32 "
DOUBLED = 'A="$A$A"\n' * 40
LONG = "A=" + "a" * 3000 + "\n"
WRITTEN = f"cat > x.json <<EOF\n{'a' * 3000}\nEOF\n"
TOO_LONG = "more than 4,000,000 characters"

GROWING = {
    "doubled": ("A=aaaa\n" + DOUBLED + TRAIN + "$A", TOO_LONG),
    "doubled by +=": ("A=aaaa\n" + "A+=$A\n" * 40 + TRAIN, TOO_LONG),
    "a doubled array": (
        "A=(a b)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40 + TRAIN,
        TOO_LONG,
    ),
    "one long word": (LONG + 'B="' + "$A" * 100_000 + '"' + TRAIN, TOO_LONG),
    "replaced": (LONG + "A=${A//a/aaaaaaaaaa}\n" * 20 + TRAIN, TOO_LONG),
    "replaced by a long word": (LONG + "B=$A$A\nC=${B//a/$B}" + TRAIN, TOO_LONG),
    "edited by sed": (
        WRITTEN + "sed -i s/a/aaaaaaaaaa/g x.json\n" * 20 + TRAIN,
        TOO_LONG,
    ),
    "edited at every place": (
        WRITTEN + "sed -i s//bbbbbbbbbb/g x.json\n" * 20 + TRAIN,
        TOO_LONG,
    ),
    "a growing command": (
        "A=' --lr 1'\n" + DOUBLED + "eval torchrun pretrain_gpt.py $A",
        TOO_LONG,
    ),
    "a growing document": (
        "A=aaaa\n" + "cat > x.json <<EOF\n$A$A\nEOF\nA=$A$A\n" * 40 + TRAIN,
        TOO_LONG,
    ),
    "a long pattern": (
        LONG + "[[ $A == *$A ]]" + TRAIN,
        "a pattern has 3,001 characters",
    ),
    "many trainings": (
        "torchrun pretrain_gpt.py --lr 1\n" * 10_000,
        "more than 100 training commands",
    ),
    "a large file": (
        "#" * 1_100_000,
        "has 1,100,000 bytes, and at most 1,000,000 are read",
    ),
}


@pytest.mark.parametrize("text, says", GROWING.values(), ids=list(GROWING))
def test_a_recipe_whose_values_grow_is_refused(text, says, tmp_path):
    (tmp_path / "train.sh").write_text(text)
    with (
        bounded(),
        pytest.raises(
            ConfigError, match="train.sh: .*this is not a recipe|bytes"
        ) as error,
    ):
        read_recipe(tmp_path / "train.sh", {})
    assert says in str(error.value)


SLOW = {
    "blank lines": "\n" * 150_000,
    "a comment of dashes": "# " + "-" * 150_000,
    "a word of dashes": "echo " + "-" * 100_000,
    "slashes of sed": f"cat > x.json <<EOF\nx\nEOF\nsed -i s{'/' * 100_000} x.json\n",
    "questions": f"A=$(({'?' * 100_000}))\n",
    "ends that fit no pattern": LONG + "B=${A%%*b}\nC=${A##b*}\n" * 300,
    "open values": "A='" + "$1" * 10 + "'\n" + "B=${A:0:1}" + "$1" * 100_000 + "\n",
    "names of long values": f"A={'1' * 900_000}\nB=$(({'A+' * 450}1))\n",
    "negations": "! " * 400_000 + "true",
    "a word of stars": "echo " + "*" * 900_000,
    "stars": LONG + f"[[ $A == {'*a' * 400}b ]]\n" * 50,
}


@pytest.mark.parametrize("text", SLOW.values(), ids=list(SLOW))
def test_a_long_recipe_is_read_in_bounded_time(text, tmp_path):
    (tmp_path / "train.sh").write_text(text + TRAIN)
    with bounded():
        try:
            (training,) = read_recipe(tmp_path / "train.sh", {})
        except ConfigError as error:
            assert "this is not a recipe" in str(error)
        else:
            assert "--num-layers" in training.words


ODD = {
    "a digit that is no decimal as a place": "A=abc; B=${A:²:1}",
    "as a length": "A=abc; B=${A:0:²}",
    "as an element": "A=(a b); B=${A[²]}",
    "as an argument": "B=${²}",
    "as a count of arguments": "shift ²",
    "as a word before a redirection": "echo ²>x",
    "many digits in a test": f"[ {'9' * 5000} -gt 1 ]",
    "many digits of a place": "A=a; B=${A:" + "9" * 5000 + "}",
    "many digits in arithmetic": f"A=$(({'9' * 900}))",
    "many digits of an argument": "A=$" + "{" + "1" * 5000 + "}",
    "a very long name": f"cat {'x' * 5000} > y.json",
    "a zero byte in a name": "cat a\0b > y.json",
}


@pytest.mark.parametrize("text", ODD.values(), ids=list(ODD))
def test_numbers_and_names_that_are_odd_are_read(text, tmp_path):
    (tmp_path / "train.sh").write_text(text + TRAIN)
    (training,) = read_recipe(tmp_path / "train.sh", {})
    assert "--num-layers" in training.words


@pytest.mark.parametrize("count", ["²", "9" * 5000, str(10**17)])
def test_numbers_of_processes_that_are_odd_are_not_believed(count, tmp_path):
    (tmp_path / "train.sh").write_text(
        f"torchrun --nproc_per_node {count} {TRAIN.partition(' ')[2]}"
    )
    (training,) = read_recipe(tmp_path / "train.sh", {})
    if training.ranks is not None:
        with bounded(), pytest.raises(ConfigError, match="at most 10,000,000"):
            assess(training, {})


@pytest.mark.parametrize(
    "text",
    [
        "A=" + "${A:-" * 400 + "}" * 400,
        "A=" + '"$(' * 1000 + ')"' * 1000,
        "[ " + "! " * 3000 + "x ]",
        "[ " + "! " * 300_000 + "x ]",
        "[[ " + "x -a " * 3000 + "x ]]",
        "[[ " + "x && " * 190_000 + "x ]]",
    ],
)
def test_deep_nesting_is_one_error(text, tmp_path):
    (tmp_path / "train.sh").write_text(text + TRAIN)
    with bounded(), pytest.raises(ConfigError, match="nested too deep"):
        read_recipe(tmp_path / "train.sh", {})


# ------------------------------------------------------------------------------------------ other files
SECRET = "TOPSECRET-PASSWORD"
READERS = (
    "cat sub/../../secret.json > ds.json",
    "sed s/x/y/ ../secret.json > ds.json",
    "cat link.json > ds.json",
    "cat folder/secret.json | sed s/x/y/ > ds.json",
    "bash sub/../../secret.sh",
    "source link.sh",
)


@pytest.mark.parametrize("line", READERS)
def test_nothing_outside_of_the_recipes_folder_is_read(line, tmp_path):
    (tmp_path / "secret.json").write_text(json.dumps({"train_batch_size": SECRET}))
    (tmp_path / "secret.sh").write_text(
        f"WORD={SECRET}\ntorchrun pretrain_gpt.py --num-layers {SECRET}\n"
    )
    folder = tmp_path / "recipe"
    (folder / "sub").mkdir(parents=True)
    (folder / "link.json").symlink_to(tmp_path / "secret.json")
    (folder / "link.sh").symlink_to(tmp_path / "secret.sh")
    (folder / "folder").symlink_to(tmp_path)
    (folder / "train.sh").write_text(
        line + TRAIN + "--lr $WORD --deepspeed_config ds.json"
    )
    for training in read_recipe(folder / "train.sh", {}):
        assert SECRET not in repr(training) and SECRET not in repr(assess(training, {}))


def test_texts_of_a_neighbouring_file_are_not_shown_and_its_valid_values_are(tmp_path):
    (tmp_path / "secret.json").write_text(
        json.dumps(
            {
                "train_batch_size": SECRET,
                "gradient_clipping": [SECRET],
                SECRET + " x": 1,
                "optimizer": {"type": SECRET},
                "train_micro_batch_size_per_gpu": 3,
                "fp16": SECRET,
            }
        )
    )
    (tmp_path / "train.sh").write_text(
        "cat secret.json > ds.json" + TRAIN + "--deepspeed_config ds.json"
    )
    (training,) = read_recipe(tmp_path / "train.sh", {})
    assessed = assess(training, {})
    assert SECRET.lower() not in repr(assessed).lower()
    values = {verdict.name: verdict.value for verdict in assessed.verdicts}
    assert values["train_micro_batch_size_per_gpu"] == "3"
    assert {"train_batch_size", "gradient_clipping", "optimizer.type", "fp16"} <= {
        verdict.name for verdict in assessed.verdicts if verdict.kind is Kind.REFUSED
    }


def test_large_neighbours_and_pipes_are_not_read(tmp_path):
    with open(tmp_path / "corpus.bin", "wb") as file:
        file.truncate(3 * 10**9)
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "train.sh").write_text(
        "cat pipe.json > x.json; source pipe.json" + TRAIN
    )
    with bounded():
        assert read_recipe(tmp_path / "train.sh", {})
    (tmp_path / "train.sh").write_text("cat corpus.bin | sed s/a/b/ > x.json" + TRAIN)
    with (
        bounded(),
        pytest.raises(
            ConfigError, match="corpus.bin has 3,000,000,000 bytes, and at most"
        ),
    ):
        read_recipe(tmp_path / "train.sh", {})


# ------------------------------------------------------------------------------------- YAML, JSON, the tool
TEN = [
    f"{one}: &{one} [{', '.join([f'*{before}'] * 10)}]"
    for before, one in zip("abcdefghi", "bcdefghij")
]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MERGED = [
    f"{one}: &{one} {{<<: [*{before}, *{before}]}}"
    for before, one in zip(LETTERS, LETTERS[1:])
]
FILES = {
    "ten to the ninth.yaml": "\n".join(["a: &a [1, 2]", *TEN]),
    "itself.yaml": "a: &a\n  b: *a\n",
    "deep.yaml": "a: " + "[" * 3000 + "]" * 3000,
    "date.yaml": "a: 2024-99-99\n",
    "digits.yaml": "a: " + "9" * 5000,
    "long.yaml": "a: 1\n" * 100_000,
    "deep.json": '{"a": ' * 3000 + "1" + "}" * 3000,
    "many keys.json": json.dumps({f"key{number}": 1 for number in range(50_000)}),
    "digits.json": '{"train_batch_size": ' + "9" * 5000 + "}",
    "words.sh": "torchrun pretrain_gpt.py "
    + " ".join(f"--unknown-{number} 1" for number in range(20_000)),
}
NUMBERS = (
    "1e999",
    "-1",
    "1000000000000000000",
    "1e308",
    "NaN",
    "null",
    "[]",
    '"\\ud800"',
    "true",
)


def test_merged_blocks_of_a_yaml_do_not_double(tmp_path):
    (tmp_path / "merged.yaml").write_text("\n".join(["a: &a {x: 1}", *MERGED]))
    with bounded():
        try:
            (training,) = read_recipe(tmp_path / "merged.yaml", {})
        except ConfigError as error:
            assert "100,000 values" in str(error)
        else:  # PyYAML from 6.0.4 on merges each entry once
            assert training.words == ("--x", "1") * 26


def test_the_checker_ends_with_one_code_for_what_it_cannot_read(
    tmp_path, monkeypatch, capsys
):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    os.mkfifo(tmp_path / "pipe.sh")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "latin.sh").write_bytes(b"\xff\xfe\x00")
    for name in [*FILES, "pipe.sh", "pipe.json", "latin.sh", "none.sh"]:
        monkeypatch.setattr("sys.argv", ["recipes/check.py", str(tmp_path / name)])
        with bounded():
            code = main()
        assert code == 2, name
        assert name in capsys.readouterr().out


@pytest.mark.parametrize(
    "key", ["train_batch_size", "gradient_clipping", "zero_optimization", "optimizer"]
)
def test_odd_numbers_of_a_json_are_verdicts(key, tmp_path):
    path = tmp_path / "ds.json"
    for number in NUMBERS:
        path.write_text(
            f'{{"{key}": {number}, "fp16": {{"enabled": true, '
            f'"initial_scale_power": {number}}}}}'
        )
        with bounded():
            assessed = assess(*read_recipe(Path(path), {}), {})
        assert assessed.ranks >= 1 and assessed.is_read


@pytest.mark.parametrize("size", ["0", "-1"])
def test_a_number_of_processes_below_1_is_refused(size, tmp_path):
    (tmp_path / "train.sh").write_text(TRAIN)
    with pytest.raises(ConfigError, match=f"--world-size {size}: give at least 1"):
        main(["--world-size", size, str(tmp_path / "train.sh")])


@pytest.mark.parametrize(
    "flag", ["--lr", "--save", "--no-such-flag", "--tokenizer-type"]
)
def test_a_long_value_is_shown_by_its_begin_and_its_length(flag, tmp_path, capsys):
    long = "a/" * 250_000
    (tmp_path / "train.sh").write_text(f"{TRAIN} {flag} {long}\n")
    main([str(tmp_path / "train.sh")])
    printed = capsys.readouterr().out
    assert flag in printed and len(printed) < 20_000
    (tmp_path / "name.sh").write_text(f"{TRAIN} --{long} 1\n")
    for options in ([], ["--summary"]):
        main([*options, str(tmp_path / "name.sh")])
        printed = capsys.readouterr().out
        assert (
            f"--{long[:100]}" in printed
            and "characters)" in printed
            and len(printed) < 20_000
        )
