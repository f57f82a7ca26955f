"""`bruno fewshot`."""

import pytest

from cli.commandline import make_images, picture_of, run, values_of


def test_the_model_beats_chance_on_unseen_digits(in_digits, pictures):
    fewshot = ["fewshot", "run", "--way", "3", "--shot", "1,5", "--trials", "10", "--rotations"]
    output = run(*fewshot)
    assert "3-way 5-shot" in output
    values = values_of("run", "few-shot-test")
    assert f"± {100 * values['bruno'][0]['spread'] / 10**0.5:.1f}" in output  # standard error of 10 trials
    assert [result["episodes"] for result in values["bruno"]] == [120, 120]  # 3 digits × 4 rotations × trials
    assert values["bruno"][0]["accuracy"] > 0.6
    assert values["bruno"][1]["accuracy"] > 0.8
    assert picture_of("run", "few-shot-test").std() > 10
    run(*fewshot, "--no-noise")
    quiet = values_of("run", "few-shot-test-without-noise")
    assert not quiet["noise"]
    assert quiet["pixels"] == values["pixels"]  # the same episodes
    assert quiet["bruno"] != values["bruno"]
    assert quiet["bruno"][1]["accuracy"] > 0.8


def test_the_default_way_is_limited_by_the_number_of_classes(tiny):
    assert "3-way 1-shot" in run("fewshot", "run", "--trials", "2")


def test_results_at_a_threshold_have_their_own_name(tiny):
    run("fewshot", "run", "--trials", "2", "--shot", "1", "--threshold", "0.01", "--no-rotations")
    values = values_of("run", "few-shot-test-above-0.01")
    assert (values["threshold"], values["rotations"]) == (0.01, False)


def test_decoys_can_be_rotations_of_the_query(tiny):
    fewshot = ["fewshot", "run", "--trials", "2", "--shot", "1", "--rotated-decoys"]
    assert "5-way 1-shot" in run(*fewshot, "--way", "5", "--rotations")  # of three digits
    values = values_of("run", "few-shot-test-rotated-decoys")
    assert (values["rotated_decoys"], values["bruno"][0]["episodes"]) == (True, 24)
    run(*fewshot, "--rotations", "--no-noise")
    assert values_of("run", "few-shot-test-rotated-decoys-without-noise")["rotated_decoys"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-rotations", "--rotated-decoys"], r"`rotated_decoys` .*rotations=False"),
        (["--way", "30"], r"`(ways|--way)` .*got 30"),
        (["--way", "1"], r"`--way` .*at least 2; got 1"),
        (["--shot", "0"], r"`--shot` .*at least 1; got 0"),
        (["--trials", "0"], r"`--trials` .*got 0"),
        (["--way", "3", "--shot", "1000"], r"`(shots|--shot)` .*got 1000"),
        (["--threshold", "-1"], r"`--threshold` .*at least 0 and at most 1; got -1"),
    ],
)
def test_a_mistake_names_the_option_and_its_value(in_digits, arguments, message):
    with pytest.raises(ValueError, match=message):
        run("fewshot", "run", *arguments)


def test_jobs_on_several_classes_report_a_split_with_one(workplace):
    make_images({f"class{i:02d}": 4 for i in range(4)}, 8)  # one of them is held out
    data = ["--set", "data.name=images", "--set", "train.set_size=3", "--set", "flow.units=16"]
    data += ["--validate", "0", "--no-verdict", "--device", "cpu"]
    run("train", "digits", "--steps", "1", "--out", "run", *data)
    classify = ["classify", "run", "images/class00", "--support", "images", "--calibrate"]
    message = r"`data` .*at least 2 classes; the (test|validation) split has 1"
    for command in (
        ["fewshot", "run"],
        ["anomaly", "watch", "run"],
        ["retrieve", "measure", "run"],
        classify,
    ):
        with pytest.raises(ValueError, match=message):
            run(*command)
    few = run("fewshot", "run", "--data", "images", "--way", "4", "--shot", "1", "--trials", "2")
    assert "4-way 1-shot" in few
    assert "temperature" in run(*classify, "--data", "images")
