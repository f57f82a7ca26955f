import torch
from attrs import evolve
from tiny import digits, trainer

from bruno.config import TrainConfig
from bruno.training.objective import Objective, episode_log_probs


def test_episode_log_probs_differ_from_scores_of_posteriors_by_the_prior_alone():
    model = trainer().model.double()
    episodes = digits().sets_of_different_classes(3, 4, 5, torch.Generator().manual_seed(0))
    scores = episode_log_probs(model.process, model.encode(episodes).z, 2)
    assert scores.shape == (3, 4, 3, 4)
    posterior = model.condition(episodes[1, :, :2])
    expected = posterior.score(episodes[1, :, 2:].unsqueeze(2))
    difference = scores[1] - expected  # the prior of a query is the same under every class
    torch.testing.assert_close(difference, difference[..., :1].expand(4, 3, 4))


def test_shared_elements_count_for_both_losses():
    config = TrainConfig(discriminative=0.5, episodes=2, way=3, shot=2, queries=4, shared=True)
    assert config.elements == 36
    current = trainer(config)
    sets, episodes = current._draw()
    assert sets is None
    weight = torch.tensor(0.5)
    loss, bits, accuracy = Objective(current.model, config, weight)(None, episodes)
    alone = evolve(config, shared=False)
    expected, *_ = Objective(current.model, alone, weight)(episodes.flatten(0, 1), episodes)
    torch.testing.assert_close(loss, expected)
    assert loss > bits
    assert 0 <= accuracy <= 1


def test_the_loss_is_the_weighted_sum_of_bits_per_dim_and_cross_entropy():
    config = TrainConfig(steps=3, batch=4, set_size=5, generative=0.7, discriminative=0.5, episodes=2, way=3)
    current = trainer(config)
    for step in current.advance(3):
        assert step.bits_per_dim > 0
        assert 0 <= step.accuracy <= 1
        assert step.loss > 0.7 * step.bits_per_dim
    model, (sets, episodes) = current.model, current._draw()
    loss, bits, _ = Objective(model, config, torch.tensor(0.5))(sets, episodes)
    scores = episode_log_probs(model.process, model.encode(episodes).z, config.shot)
    cross_entropy = -scores.log_softmax(3).diagonal(dim1=1, dim2=3).mean()  # class i given support of class i
    torch.testing.assert_close(bits, model.bits_per_dim(model.log_prob(sets)).mean())
    torch.testing.assert_close(loss, 0.7 * bits + 0.5 * cross_entropy)


def test_a_loss_without_data_is_nan_in_the_measurements():
    config = TrainConfig(batch=4, set_size=5)
    current = trainer(config)
    sets, episodes = current._draw()
    assert episodes is None
    loss, bits, accuracy = Objective(current.model, config, torch.tensor(0.0))(sets, None)
    assert loss == bits
    assert accuracy.isnan()
