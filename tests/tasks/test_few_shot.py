from collections import Counter
from dataclasses import replace

import pytest
import torch

from bruno import Bruno
from bruno.config import FlowConfig, ModelConfig, ProcessConfig
from bruno.data import Examples
from bruno.data.examples import concatenate
from bruno.data.sampling import SetSampler
from bruno.tasks.episodes import FewShotProtocol, draw_episodes
from bruno.tasks.few_shot import compare_few_shot, episode_scores, measure_few_shot, measure_pixels


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def characters() -> Examples:
    """Six characters of 4 to 9 images; the first pixel encodes the class, the last the image."""
    counts = torch.tensor([4, 9, 6, 5, 7, 4])
    labels = torch.repeat_interleave(torch.arange(6), counts)
    within = torch.cat([torch.arange(n) for n in counts])
    images = torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8)
    images[:, 0, 0, 0], images[:, 0, 1, 1] = 100 + labels, within
    return Examples(images, labels, tuple("abcdef"))


# --- episodes ---------------------------------------------------------------------------------------------


def character_turn_and_image(sampler: SetSampler, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Character, rotation and image of each index, from its pixels; the brightest corner is the rotation."""
    corners = sampler.at(index.flatten())[:, 0].flatten(1).long()[:, [0, 2, 3, 1]]
    turn = corners.argmax(1)  # a quarter turn anticlockwise moves the upper left corner to the lower left
    image = corners.gather(1, (turn.unsqueeze(1) + 2) % 4).squeeze(1)
    return tuple(t.view(index.shape) for t in (corners.amax(1) - 100, turn, image))


def test_every_rotated_class_is_queried_once_a_trial(characters):
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
        queried, turn, _ = character_turn_and_image(sampler, query)
        character, turns, _ = character_turn_and_image(sampler, support)
        assert (character[:, 0] == queried.unsqueeze(1)).all()
        assert (turns[:, 0] == turn.unsqueeze(1)).all()
        assert not (support[:, 0] == query.unsqueeze(1)).any()


def test_a_support_is_of_one_character_in_one_rotation_without_repetition(characters):
    sampler = SetSampler(characters, rotations=True)
    _, support = draw_episodes(sampler, 4, 3, seeded())
    character, turn, _ = character_turn_and_image(sampler, support)
    assert (character == character[..., :1]).all()
    assert (turn == turn[..., :1]).all()
    assert all(len(set(images)) == 3 for images in support.flatten(0, 1).tolist())


def test_decoys_are_different_characters_and_never_rotations_of_one(characters):
    sampler = SetSampler(characters, rotations=True)
    for seed in range(20):
        _, support = draw_episodes(sampler, 4, 1, seeded(seed))
        character, _, _ = character_turn_and_image(sampler, support[..., 0])
        assert all(len(set(row)) == 4 for row in character.tolist())


def test_characters_rotations_and_images_of_decoys_are_uniform(characters):
    sampler = SetSampler(characters, rotations=True)
    decoys = torch.cat([draw_episodes(sampler, 4, 1, seeded(s)).support[:, 1:, 0] for s in range(300)])
    character, turn, image = (t.flatten() for t in character_turn_and_image(sampler, decoys))
    for values, kinds in ((character, 6), (turn, 4), (image[character == 1], 9)):
        shares = torch.bincount(values, minlength=kinds).double() / len(values)
        torch.testing.assert_close(shares, torch.full_like(shares, 1 / kinds), rtol=0, atol=0.02)


def test_rotated_decoys_are_all_other_rotated_classes_equally_often(characters):
    """23 of them, of which 3 are rotations of the queried character."""
    sampler = SetSampler(characters, rotations=True)
    counts = torch.zeros(24, 24)
    for seed in range(300):
        query, support = draw_episodes(sampler, 4, 2, seeded(seed), rotated_decoys=True)
        character, turn, _ = character_turn_and_image(sampler, support)
        assert (character == character[..., :1]).all()
        assert (turn == turn[..., :1]).all()
        chosen = (turn * 6 + character)[..., 0]
        assert chosen[:, 0].tolist() == list(range(24))  # the query's own class
        assert not (support[:, 0] == query.unsqueeze(1)).any()
        assert all(len(set(row)) == 4 for row in chosen.tolist())
        counts.scatter_add_(1, chosen, torch.ones(24, 4))
    assert (counts.diagonal() == 300).all()
    others = counts[~torch.eye(24, dtype=torch.bool)] / 300
    torch.testing.assert_close(others, torch.full_like(others, 3 / 23), rtol=0, atol=0.1)
    turns = torch.cat([counts.diagonal(6 * k) for k in (1, 2, 3)]) / 300
    assert turns.mean().item() == pytest.approx(3 / 23, abs=0.01)


def test_rotated_decoys_allow_more_ways_than_characters(characters):
    protocol = FewShotProtocol((24,), (1,), trials=2, rotations=True, rotated_decoys=True)
    (result,) = measure_pixels(characters, protocol, generator=seeded())
    assert (result.way, result.episodes) == (24, 48)
    with pytest.raises(ValueError, match=r"`ways` .* 24.*; got 25"):
        measure_pixels(characters, replace(protocol, ways=(25,)), generator=seeded())
    assert replace(protocol, ways=(30,)).limited_to(characters).ways == (24,)


def test_symmetric_characters_are_ambiguous_only_with_rotated_decoys():
    """Every image looks the same in all rotations, so a rotated decoy of its class is a tie."""
    images = torch.zeros(12, 1, 4, 4, dtype=torch.uint8)
    images[:6, 0, 1:3, 1:3] = 200
    images[6:] = 200 - images[:6]
    symmetric = Examples(images, torch.arange(12) // 6, ("x", "y"))

    def accuracy(**settings: bool) -> float:
        protocol = FewShotProtocol((2,), (1,), trials=20, rotations=True, **settings)
        (result,) = measure_pixels(symmetric, protocol, generator=seeded())
        return result.accuracy

    assert accuracy() == 1.0
    assert accuracy(rotated_decoys=True) == pytest.approx(4 / 7, abs=0.15)  # 4 of 7 decoys differ


def test_without_rotations_no_image_is_rotated(characters):
    sampler = SetSampler(characters)
    query, support = draw_episodes(sampler, 6, 3, seeded())
    assert support.shape == (6, 6, 3)
    assert character_turn_and_image(sampler, query)[0].tolist() == list(range(6))
    assert not character_turn_and_image(sampler, support)[1].any()


def test_easy_classes_are_always_classified_correctly():
    """Classes differ in every rotation by the position of a bright pixel; images of a class by a grey one."""
    images = torch.zeros(36, 1, 8, 8, dtype=torch.uint8)
    labels = torch.arange(6).repeat_interleave(6)
    images[torch.arange(36), 0, 0, labels + 1] = 200
    images[torch.arange(36), 0, 4, 4] = torch.arange(36).to(torch.uint8)
    easy = Examples(images, labels, tuple("abcdef"))
    for matching in ("nearest", "attention"):
        protocol = FewShotProtocol(ways=(2, 6), shots=(1, 5), trials=2, rotations=True)
        results = measure_pixels(easy, protocol, generator=seeded(), matching=matching)
        assert [(r.way, r.shot, r.accuracy, r.episodes) for r in results] == [
            (2, 1, 1.0, 48),
            (2, 5, 1.0, 48),
            (6, 1, 1.0, 48),
            (6, 5, 1.0, 48),
        ]


def test_a_tie_counts_as_wrong():
    same = Examples(torch.full((8, 1, 2, 2), 9, dtype=torch.uint8), torch.arange(2).repeat(4), ("x", "y"))
    (result,) = measure_pixels(same, FewShotProtocol((2,), (1,), trials=2), generator=seeded())
    assert result.accuracy == 0.0


# --- a trained model --------------------------------------------------------------------------------------


def test_on_unseen_digits_the_model_beats_pixels_and_chance(digits_model, unseen_digits):
    protocol = FewShotProtocol(ways=(3,), shots=(1, 5), trials=150, noise=False)
    found = compare_few_shot(digits_model, unseen_digits, protocol, generator=seeded())
    (one, five), (pixels, pixels_five) = found.model, found.baseline
    assert one.accuracy > pixels.accuracy + 0.02
    assert one.accuracy > 1 / 3 + 0.3
    assert five.accuracy > max(one.accuracy + 0.03, pixels_five.accuracy - 0.03)


def test_on_all_ten_digits_and_their_rotations_the_model_is_far_above_chance(
    digits_model, learnt_digits, unseen_digits
):
    digits = concatenate([learnt_digits, unseen_digits])
    protocol = FewShotProtocol(ways=(5, 10), shots=(1, 5), trials=8, rotations=True)
    results = measure_few_shot(digits_model, digits, protocol, generator=seeded())
    assert all(result.accuracy > 1 / result.way + 0.25 for result in results)
    by_setting = {(r.way, r.shot): r.accuracy for r in results}
    assert by_setting[5, 5] > by_setting[5, 1] > by_setting[10, 1]
    assert {result.episodes for result in results} == {8 * 40}


def test_accuracy_and_spread_match_the_trials(digits_model, unseen_digits):
    protocol = FewShotProtocol((3,), (1,), trials=4)
    (result,) = measure_few_shot(digits_model, unseen_digits, protocol, generator=seeded())
    assert (result.trials, len(result.by_trial), result.episodes) == (4, 4, 12)
    shares = torch.tensor(result.by_trial, dtype=torch.double)
    assert result.accuracy == pytest.approx(shares.mean().item())
    assert result.spread == pytest.approx(shares.std().item())
    assert result.error == pytest.approx(shares.std().item() / 2)
    assert all(abs(3 * share - round(3 * share)) < 1e-9 for share in result.by_trial)


def test_the_same_seed_gives_the_same_result_for_any_part_size(digits_model, unseen_digits, monkeypatch):
    def measured(seed: int) -> tuple[float, ...]:
        protocol = FewShotProtocol((3,), (2,), trials=6, rotations=True)
        (result,) = measure_few_shot(digits_model, unseen_digits, protocol, generator=seeded(seed))
        return result.by_trial

    first = measured(1)
    assert measured(1) == first
    assert measured(2) != first
    monkeypatch.setattr("bruno.tasks.scorers._NUMBERS_AT_A_TIME", 1000)
    assert measured(1) == first


@pytest.mark.slow
def test_the_class_with_the_highest_posterior_density_wins():
    """Rows have no dequantisation noise, so the episodes can be scored again one by one."""
    labels = torch.arange(5).repeat(8)
    rows = Examples(torch.randn(5, 4)[labels] + torch.randn(40, 4), labels, tuple("abcde"))
    flow, process = FlowConfig(kind="dense", couplings=2, units=8), ProcessConfig(dof=10.0, correlation=0.5)
    model = Bruno.from_config(ModelConfig(shape=(4,), levels=0, flow=flow, process=process))
    model.initialise(rows.elements)
    (result,) = measure_few_shot(model, rows, FewShotProtocol((3,), (2,), trials=8), generator=seeded(3))
    assert 0.35 < result.accuracy < 0.95
    sampler = SetSampler(rows)
    first_seeds = torch.randint(2**62, (8, 2), generator=seeded(3))[:, 0].tolist()  # of the episodes
    for seed, share in zip(first_seeds, result.by_trial, strict=True):
        won = 0
        for query, support in zip(*draw_episodes(sampler, 3, 2, seeded(seed)), strict=True):
            x = sampler.at(query.unsqueeze(0))[0]
            scores = [model.condition(sampler.at(some)).log_prob(x).item() for some in support]
            won += scores[0] > max(scores[1:])
        assert share == won / 5


def test_each_trial_has_fresh_noise_and_encodes_an_image_once(digits_model, monkeypatch):
    """With only five images, most trials need them all, and none encodes an image twice."""
    images = torch.randint(0, 17, (5, 1, 8, 8), dtype=torch.uint8)
    few = Examples(images, torch.tensor([0, 0, 1, 1, 1]), ("x", "y"))
    seen = []
    encode = digits_model.encode

    def watched(x, *args, **options):
        encoded = encode(x, *args, **options)
        seen.append(encoded.z)
        return encoded

    monkeypatch.setitem(vars(digits_model), "encode", watched)
    measure_few_shot(digits_model, few, FewShotProtocol((2,), (1,), trials=40), generator=seeded())
    assert all(len(z) <= 5 for z in seen)
    whole = torch.stack([z for z in seen if len(z) == 5])
    assert len(whole) > 2
    assert len(whole[:, 0].unique(dim=0)) == len(whole)


def test_episode_scores_give_the_accuracy(digits_model, unseen_digits):
    protocol = FewShotProtocol((3,), (2,), trials=6)
    (result,) = measure_few_shot(digits_model, unseen_digits, protocol, generator=seeded())
    scores = episode_scores(digits_model, unseen_digits, protocol, generator=seeded())
    assert scores.shape == (result.episodes, 3)
    assert (scores.argmax(1) == 0).double().mean().item() == pytest.approx(result.accuracy)


def test_scores_of_views_are_the_mean_over_rotated_and_mirrored_episodes(digits_model, unseen_digits):
    """Rotated and mirrored images of all classes are other examples with the same episodes."""
    protocol = FewShotProtocol((3,), (2,), trials=2, noise=False)
    found = episode_scores(digits_model, unseen_digits, replace(protocol, views=True), generator=seeded())
    by_view = []
    for start in (unseen_digits.elements, unseen_digits.elements.flip(-1)):
        for turns in range(4):
            turned = replace(unseen_digits, elements=start.rot90(turns, (-2, -1)))
            by_view.append(episode_scores(digits_model, turned, protocol, generator=seeded()))
    torch.testing.assert_close(found, torch.stack(by_view).mean(0), rtol=1e-4, atol=1e-3)
    assert not torch.allclose(found, by_view[0], rtol=0.01)


def test_a_rotated_and_mirrored_task_has_the_same_scores_of_views(digits_model, unseen_digits):
    protocol = FewShotProtocol((3,), (1,), trials=2, noise=False, views=True)
    turned = replace(unseen_digits, elements=unseen_digits.elements.flip(-2).rot90(1, (-2, -1)))
    scores = [
        episode_scores(digits_model, some, protocol, generator=seeded()) for some in (unseen_digits, turned)
    ]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-3)


def test_views_of_rows_raise():
    rows = Examples(torch.randn(20, 4), torch.arange(20) // 10, ("a", "b"))
    model = Bruno.from_config(ModelConfig((4,), levels=0, flow=FlowConfig("dense", couplings=2, units=8)))
    with pytest.raises(ValueError, match=r"`views` is for square images; got elements \(4,\)"):
        measure_few_shot(model, rows, FewShotProtocol((2,), (1,), views=True), generator=seeded())


def test_a_threshold_of_0_keeps_all_dimensions_and_a_high_one_few(digits_model, unseen_digits):
    def accuracy(threshold: float | None) -> float:
        protocol = FewShotProtocol((3,), (1,), trials=40, noise=False, threshold=threshold)
        (result,) = measure_few_shot(digits_model, unseen_digits, protocol, generator=seeded())
        return result.accuracy

    assert accuracy(0.0) == accuracy(None)
    highest = digits_model.process.correlation.sort().values
    assert accuracy(highest[-2].item()) < accuracy(None) - 0.1


def test_progress_counts_images_encoded_and_queries_scored(characters):
    reports = []
    protocol = FewShotProtocol((2,), (1,), trials=3, rotations=True)
    measure_pixels(characters, protocol, generator=seeded(), progress=lambda *report: reports.append(report))
    assert reports == sorted(reports)
    assert reports[-1] == (4 * 35 + 3 * 4 * 6, 4 * 35 + 3 * 4 * 6)  # encoded once, queried three times


@pytest.mark.parametrize(("noise", "times"), [(True, 5), (False, 1)])
def test_an_image_is_encoded_in_each_trial_with_noise_and_once_without(
    digits_model, unseen_digits, monkeypatch, noise, times
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
        FewShotProtocol((3,), (9,), trials=5, noise=noise),  # nine and the query: all ten of each class
        generator=seeded(),
        progress=lambda *report: reports.append(report),
    )
    assert Counter(Counter(seen).values()) == {times: 30}
    assert reports[-1] == (30 * times + 15, 30 * times + 15)


# --- the baseline -----------------------------------------------------------------------------------------


def test_the_baseline_is_measured_on_the_episodes_of_the_model(digits_model, unseen_digits):
    protocol, reports = FewShotProtocol((3,), (1, 2), trials=3), []
    found = compare_few_shot(
        digits_model,
        unseen_digits,
        protocol,
        generator=seeded(),
        progress=lambda *report: reports.append(report),
    )
    assert found.model == measure_few_shot(digits_model, unseen_digits, protocol, generator=seeded())
    assert found.baseline == measure_pixels(unseen_digits, protocol, generator=seeded())
    assert (found.protocol, found.features) == (protocol, "pixels")
    assert reports == sorted(reports)
    work = (3 + 1) * len(unseen_digits) + 2 * 3 * 2 * 3  # three encodings and one, then all queries twice
    assert reports[-1] == (work, work)


def test_the_baseline_of_rows_does_not_depend_on_the_units_of_columns():
    """The first column separates the classes; the second is noise in units a million times smaller."""
    labels = torch.arange(4).repeat(10)
    x = torch.stack([10.0 * labels, 1e6 * torch.randn(40)], 1) + torch.randn(40, 2)
    rows = Examples(x, labels, tuple("abcd"))
    model = Bruno.from_config(ModelConfig(shape=(2,), levels=0, flow=FlowConfig("dense", couplings=0)))
    model.initialise(rows.elements)
    protocol = FewShotProtocol((4,), (3,), trials=10)
    found = compare_few_shot(model, rows, protocol, generator=seeded())
    (as_given,) = measure_pixels(rows, protocol, generator=seeded())
    assert found.features == "columns"
    assert found.baseline[0].accuracy > as_given.accuracy + 0.2


# --- settings ---------------------------------------------------------------------------------------------


def test_a_protocol_can_be_limited_to_the_examples(characters):
    assert FewShotProtocol((5, 20, 30), (1, 5), trials=3).limited_to(characters) == FewShotProtocol(
        (5, 6), (1, 3), trials=3
    )


def test_results_are_in_the_order_of_the_settings(characters):
    protocol = FewShotProtocol(ways=(3, 2), shots=(2, 1), trials=2)
    results = measure_pixels(characters, protocol, generator=seeded())
    assert tuple((r.way, r.shot) for r in results) == protocol.settings == ((3, 2), (3, 1), (2, 2), (2, 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ways": (5, 1)}, r"`ways` .*2; got 1\."),
        ({"ways": ()}, r"`ways` .*got none"),
        ({"shots": (0,)}, r"`shots` .*1; got 0"),
        ({"shots": ()}, r"`shots` .*got none"),
        ({"trials": 1}, r"`trials` .*2; got 1"),
        ({"rotated_decoys": True}, r"`rotated_decoys` .*`rotations`; got `rotations=False`"),
        ({"batch_size": 0}, r"`batch_size` .*1; got 0"),
    ],
)
def test_impossible_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        FewShotProtocol(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ways": (5, 7)}, r"`ways` .* 6.*; got 7"),
        ({"shots": (1, 4)}, r"`shots` .* 3.*; got 4"),
        ({"threshold": 0.99}, r"`threshold` .* 0\.1,.*; got 0\.99"),
    ],
)
def test_settings_beyond_the_examples_or_the_model_raise(tiny_model, characters, settings, message):
    protocol = FewShotProtocol(**{"ways": (2,), "shots": (1,), "trials": 2, **settings})
    with pytest.raises(ValueError, match=message):
        measure_few_shot(tiny_model, characters, protocol, generator=seeded())


def test_episode_scores_need_a_single_setting(tiny_model, characters):
    with pytest.raises(ValueError, match=r"`protocol` .*got ways=\(2, 3\), shots=\(1,\)"):
        episode_scores(tiny_model, characters, FewShotProtocol((2, 3), (1,)), generator=seeded())


def test_a_single_class_raises(tiny_model, characters):
    alone = characters.of_classes([2])
    with pytest.raises(ValueError, match=r"`examples` .*two classes.*got 1"):
        measure_few_shot(tiny_model, alone, FewShotProtocol(rotations=True), generator=seeded())


def test_images_of_another_size_raise(digits_model, characters):
    with pytest.raises(ValueError, match=r"`x` .*\(1, 8, 8\); got .*2, 2\)"):
        measure_few_shot(digits_model, characters, FewShotProtocol((2,), (1,)), generator=seeded())


def test_an_unknown_matching_raises(characters, without_shape_checks):
    protocol = FewShotProtocol((2,), (1,))
    with pytest.raises(ValueError, match=r"`matching` .*'nearest' or 'attention'; got 'euclid'"):
        measure_pixels(characters, protocol, generator=seeded(), matching="euclid")
    rows = Examples(torch.randn(8, 3), torch.arange(2).repeat(4), ("x", "y"))
    with pytest.raises(ValueError, match=r"`matching` .*'nearest'; got 'attention'"):
        measure_pixels(rows, protocol, generator=seeded(), matching="attention")
