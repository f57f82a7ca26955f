from collections import Counter

import pytest
import torch

from bruno import Bruno
from bruno.config import FlowConfig, ModelConfig, ProcessConfig
from bruno.data import Examples
from bruno.data.examples import concatenate
from bruno.data.sampling import SetSampler
from bruno.tasks.few_shot import draw_episodes, episode_scores, measure_few_shot, measure_pixels


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def characters() -> Examples:
    """Six characters of 4 to 9 images; the first pixel tells the class, the last the image in it."""
    counts = torch.tensor([4, 9, 6, 5, 7, 4])
    labels = torch.repeat_interleave(torch.arange(6), counts)
    within = torch.cat([torch.arange(n) for n in counts])
    images = torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8)
    images[:, 0, 0, 0], images[:, 0, 1, 1] = 100 + labels, within
    return Examples(images, labels, tuple("abcdef"))


# --- the protocol -----------------------------------------------------------------------------------------


def character_turn_and_image(sampler: SetSampler, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What an index stands for, read off the image itself: where its brightest pixel is tells the turn."""
    corners = sampler.at(index.flatten())[:, 0].flatten(1).long()[:, [0, 2, 3, 1]]
    turn = corners.argmax(1)  # a quarter turn against the clock takes the upper left to the lower left
    image = corners.gather(1, (turn.unsqueeze(1) + 2) % 4).squeeze(1)
    return tuple(t.view(index.shape) for t in (corners.amax(1) - 100, turn, image))


def test_every_rotated_class_is_asked_once_a_trial(characters):
    sampler = SetSampler(characters, rotations=True)
    query, _ = draw_episodes(sampler, 3, 2, seeded())
    character, turn, _ = character_turn_and_image(sampler, query)
    assert sorted(zip(character.tolist(), turn.tolist(), strict=True)) == [
        (c, t) for c in range(6) for t in range(4)
    ]


def test_the_query_belongs_to_the_first_support_and_is_not_in_it(characters):
    sampler = SetSampler(characters, rotations=True)
    for seed in range(20):
        query, support = draw_episodes(sampler, 3, 3, seeded(seed))
        asked, turn, _ = character_turn_and_image(sampler, query)
        character, turns, _ = character_turn_and_image(sampler, support)
        assert (character[:, 0] == asked.unsqueeze(1)).all()
        assert (turns[:, 0] == turn.unsqueeze(1)).all()
        assert not (support[:, 0] == query.unsqueeze(1)).any()


def test_a_support_is_of_one_character_turned_one_way_and_repeats_nothing(characters):
    sampler = SetSampler(characters, rotations=True)
    _, support = draw_episodes(sampler, 4, 3, seeded())
    character, turn, _ = character_turn_and_image(sampler, support)
    assert (character == character[..., :1]).all()
    assert (turn == turn[..., :1]).all()
    assert all(len(set(images)) == 3 for images in support.flatten(0, 1).tolist())


def test_decoys_are_other_characters_never_a_rotation_of_the_same_one(characters):
    sampler = SetSampler(characters, rotations=True)
    for seed in range(20):
        _, support = draw_episodes(sampler, 4, 1, seeded(seed))
        character, _, _ = character_turn_and_image(sampler, support[..., 0])
        assert all(len(set(row)) == 4 for row in character.tolist())


def test_decoys_characters_rotations_and_images_are_all_equally_likely(characters):
    sampler = SetSampler(characters, rotations=True)
    decoys = torch.cat([draw_episodes(sampler, 4, 1, seeded(s)).support[:, 1:, 0] for s in range(300)])
    character, turn, image = (t.flatten() for t in character_turn_and_image(sampler, decoys))
    for values, kinds in ((character, 6), (turn, 4), (image[character == 1], 9)):
        shares = torch.bincount(values, minlength=kinds).double() / len(values)
        torch.testing.assert_close(shares, torch.full_like(shares, 1 / kinds), rtol=0, atol=0.02)


def test_without_rotations_no_image_is_turned(characters):
    sampler = SetSampler(characters)
    query, support = draw_episodes(sampler, 6, 3, seeded())
    assert support.shape == (6, 6, 3)
    assert character_turn_and_image(sampler, query)[0].tolist() == list(range(6))
    assert not character_turn_and_image(sampler, support)[1].any()


def test_what_tells_classes_apart_is_found_every_time():
    """Classes differ, rotated or not, by where on the border they are bright; their images by a grey pixel."""
    images = torch.zeros(36, 1, 8, 8, dtype=torch.uint8)
    labels = torch.arange(6).repeat_interleave(6)
    images[torch.arange(36), 0, 0, labels + 1] = 200
    images[torch.arange(36), 0, 4, 4] = torch.arange(36).to(torch.uint8)
    easy = Examples(images, labels, tuple("abcdef"))
    for matching in ("nearest", "attention"):
        results = measure_pixels(
            easy, ways=(2, 6), shots=(1, 5), trials=2, rotations=True, generator=seeded(), matching=matching
        )
        assert [(r.way, r.shot, r.accuracy, r.episodes) for r in results] == [
            (2, 1, 1.0, 48),
            (2, 5, 1.0, 48),
            (6, 1, 1.0, 48),
            (6, 5, 1.0, 48),
        ]


def test_a_tie_counts_as_wrong():
    same = Examples(torch.full((8, 1, 2, 2), 9, dtype=torch.uint8), torch.arange(2).repeat(4), ("x", "y"))
    (result,) = measure_pixels(same, ways=(2,), shots=(1,), trials=2, generator=seeded())
    assert result.accuracy == 0.0


# --- a trained model --------------------------------------------------------------------------------------


def test_on_unseen_digits_the_model_beats_pixels_and_chance(digits_model, unseen_digits):
    protocol = {"ways": (3,), "shots": (1, 5), "trials": 150}
    one, five = measure_few_shot(digits_model, unseen_digits, **protocol, generator=seeded())
    pixels, pixels_five = measure_pixels(unseen_digits, **protocol, generator=seeded())
    assert one.accuracy > pixels.accuracy + 0.02
    assert one.accuracy > 1 / 3 + 0.3
    assert five.accuracy > max(one.accuracy + 0.03, pixels_five.accuracy - 0.03)


def test_among_all_ten_digits_and_their_rotations_the_model_is_far_above_chance(
    digits_model, learnt_digits, unseen_digits
):
    digits = concatenate([learnt_digits, unseen_digits])
    results = measure_few_shot(
        digits_model, digits, ways=(5, 10), shots=(1, 5), trials=8, rotations=True, generator=seeded()
    )
    assert all(result.accuracy > 1 / result.way + 0.25 for result in results)
    by_setting = {(r.way, r.shot): r.accuracy for r in results}
    assert by_setting[5, 5] > by_setting[5, 1] > by_setting[10, 1]
    assert {result.episodes for result in results} == {8 * 40}


def test_a_result_adds_up(digits_model, unseen_digits):
    (result,) = measure_few_shot(
        digits_model, unseen_digits, ways=(3,), shots=(1,), trials=4, generator=seeded()
    )
    assert (result.trials, len(result.by_trial), result.episodes) == (4, 4, 12)
    shares = torch.tensor(result.by_trial, dtype=torch.double)
    assert result.accuracy == pytest.approx(shares.mean().item())
    assert result.spread == pytest.approx(shares.std().item())
    assert all(abs(3 * share - round(3 * share)) < 1e-9 for share in result.by_trial)


def test_the_same_seed_gives_the_same_result_however_it_is_cut_up(digits_model, unseen_digits, monkeypatch):
    def measured(seed: int) -> tuple[float, ...]:
        (result,) = measure_few_shot(
            digits_model,
            unseen_digits,
            ways=(3,),
            shots=(2,),
            trials=6,
            rotations=True,
            generator=seeded(seed),
        )
        return result.by_trial

    first = measured(1)
    assert measured(1) == first
    assert measured(2) != first
    monkeypatch.setattr("bruno.tasks.scorers._NUMBERS_AT_A_TIME", 1000)
    assert measured(1) == first


def test_the_winner_is_who_the_posterior_says():
    """Rows of real numbers are not dequantised, so the episodes can be gone through again, one by one."""
    labels = torch.arange(5).repeat(8)
    rows = Examples(torch.randn(5, 4)[labels] + torch.randn(40, 4), labels, tuple("abcde"))
    flow, process = FlowConfig(kind="dense", couplings=2, units=8), ProcessConfig(dof=10.0, correlation=0.5)
    model = Bruno.from_config(ModelConfig(shape=(4,), levels=0, flow=flow, process=process))
    model.initialise(rows.elements)
    (result,) = measure_few_shot(model, rows, ways=(3,), shots=(2,), trials=20, generator=seeded(3))
    assert 0.35 < result.accuracy < 0.95
    sampler = SetSampler(rows)
    first_seeds = torch.randint(2**62, (20, 2), generator=seeded(3))[:, 0].tolist()  # those of the episodes
    for seed, share in zip(first_seeds, result.by_trial, strict=True):
        won = 0
        for query, support in zip(*draw_episodes(sampler, 3, 2, seeded(seed)), strict=True):
            x = sampler.at(query.unsqueeze(0))[0]
            scores = [model.condition(sampler.at(some)).log_prob(x).item() for some in support]
            won += scores[0] > max(scores[1:])
        assert share == won / 5


def test_noise_is_fresh_in_each_trial_and_an_image_is_encoded_once_in_it(digits_model, monkeypatch):
    """With five images in all, every trial needs them all, and encodes none of them twice."""
    images = torch.randint(0, 17, (5, 1, 8, 8), dtype=torch.uint8)
    few = Examples(images, torch.tensor([0, 0, 1, 1, 1]), ("x", "y"))
    seen = []
    encode = digits_model.encode

    def watched(x, *args, **options):
        encoded = encode(x, *args, **options)
        seen.append(encoded.z)
        return encoded

    monkeypatch.setattr(digits_model, "encode", watched)
    measure_few_shot(digits_model, few, ways=(2,), shots=(1,), trials=40, generator=seeded())
    assert all(len(z) <= 5 for z in seen)
    whole = torch.stack([z for z in seen if len(z) == 5])
    assert len(whole) > 2
    assert len(whole[:, 0].unique(dim=0)) == len(whole)


def test_the_scores_of_all_episodes_give_the_accuracy(digits_model, unseen_digits):
    (result,) = measure_few_shot(
        digits_model, unseen_digits, ways=(3,), shots=(2,), trials=6, generator=seeded()
    )
    scores = episode_scores(digits_model, unseen_digits, way=3, shot=2, trials=6, generator=seeded())
    assert scores.shape == (result.episodes, 3)
    assert (scores.argmax(1) == 0).double().mean().item() == pytest.approx(result.accuracy)


def test_a_threshold_of_0_is_none_and_a_high_one_leaves_few_dimensions(digits_model, unseen_digits):
    def accuracy(threshold: float | None) -> float:
        (result,) = measure_few_shot(
            digits_model,
            unseen_digits,
            ways=(3,),
            shots=(1,),
            trials=40,
            generator=seeded(),
            threshold=threshold,
        )
        return result.accuracy

    assert accuracy(0.0) == accuracy(None)
    highest = digits_model.process.correlation.sort().values
    assert accuracy(highest[-2].item()) < accuracy(None) - 0.1


def test_progress_ends_where_it_should(characters):
    reports = []
    measure_pixels(
        characters,
        ways=(2,),
        shots=(1,),
        trials=3,
        rotations=True,
        generator=seeded(),
        progress=lambda *report: reports.append(report),
    )
    assert reports == sorted(reports)
    assert reports[-1] == (4 * 35 + 3 * 4 * 6, 4 * 35 + 3 * 4 * 6)  # encoded once, asked three times


@pytest.mark.parametrize(("noisy", "times"), [(True, 5), (False, 1)])
def test_an_image_is_encoded_in_each_trial_that_has_noise_of_its_own(
    digits_model, unseen_digits, monkeypatch, noisy, times
):
    encode, seen = Bruno.encode, []

    def counting(self, x, *rest, **named):
        seen.extend(image.tobytes() for image in x.numpy())
        return encode(self, x, *rest, **named)

    monkeypatch.setattr(Bruno, "encode", counting)
    some = unseen_digits.of_classes([0, 1, 2])
    few = Examples(some.elements.unique(dim=0)[:30], torch.arange(30) // 10, some.names, levels=17)
    reports = []
    measure_few_shot(
        digits_model,
        few,
        ways=(3,),
        shots=(9,),  # with the query, all ten of each class
        trials=5,
        generator=seeded(),
        noisy=noisy,
        progress=lambda *report: reports.append(report),
    )
    assert Counter(Counter(seen).values()) == {times: 30}
    assert reports[-1] == (30 * times + 15, 30 * times + 15)


# --- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ways": (5, 7)}, r"`ways` must be from 2 to 6, the number of classes, rotations not .*; got 7"),
        ({"ways": (1,)}, r"`ways` must be from 2 to 6.*; got 1\."),
        ({"shots": (1, 4)}, r"`shots` must be from 1 to 3, for 4 images a class and one query; got 4"),
        ({"shots": (0,)}, r"`shots` must be from 1 to 3.*; got 0"),
        ({"shots": ()}, r"`shots` must be from 1 to 3.*; got none"),
        ({"trials": 1}, r"`trials` must be at least 2, for a spread to be told; got 1"),
        (
            {"threshold": 0.99},
            r"`threshold` must be below 0\.1, the largest correlation of the model; got 0\.99",
        ),
    ],
)
def test_asking_for_what_there_is_not(tiny_model, characters, options, message):
    with pytest.raises(ValueError, match=message):
        measure_few_shot(
            tiny_model,
            characters,
            **{"ways": (2,), "shots": (1,), "trials": 2, **options},
            generator=seeded(),
        )


def test_one_class_is_nothing_to_choose_from(tiny_model, characters):
    alone = characters.of_classes([2])
    with pytest.raises(ValueError, match=r"`examples` must have at least two classes to choose from; got 1"):
        measure_few_shot(tiny_model, alone, rotations=True, generator=seeded())


def test_images_of_another_size_than_the_models(digits_model, characters):
    with pytest.raises(ValueError, match=r"`x` must end in shape \(1, 8, 8\); got .*2, 2\)"):
        measure_few_shot(digits_model, characters, ways=(2,), shots=(1,), generator=seeded())


def test_an_unknown_way_to_match_pixels(characters, without_shape_checks):
    with pytest.raises(ValueError, match=r"`matching` must be 'nearest' or 'attention'; got 'euclid'"):
        measure_pixels(characters, ways=(2,), shots=(1,), generator=seeded(), matching="euclid")
    rows = Examples(torch.randn(8, 3), torch.arange(2).repeat(4), ("x", "y"))
    with pytest.raises(ValueError, match=r"`matching` must be 'nearest'; got 'attention'"):
        measure_pixels(rows, ways=(2,), shots=(1,), generator=seeded(), matching="attention")
