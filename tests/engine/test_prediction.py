"""An answer is followed through its prediction, forwards only."""

from disagg.engine.prediction import FollowedPrediction

TWENTY = range(20)
FOUR = range(4)


def followed(prediction, *answer):
    place = FollowedPrediction(prediction)
    place.follow(answer)
    return place


def test_an_answer_is_expected_to_begin_as_its_prediction():
    place = followed(FOUR)

    assert place.continuation(3) == [0, 1, 2]


def test_what_follows_the_answer_so_far_is_next():
    place = followed(FOUR, 0, 1)

    assert place.continuation(9) == [2, 3]
    assert place.matched == 2


def test_nothing_is_next_behind_a_token_that_was_not_predicted():
    place = followed(FOUR, 0, 99)

    assert place.continuation(2) == []


def test_three_tokens_further_on_find_the_place_again():
    place = followed(TWENTY, 0, 1, 99, 5, 6, 7)

    assert place.continuation(2) == [8, 9]
    assert place.matched == 5


def test_a_passage_counts_once_however_often_it_is_repeated():
    answer = [*FOUR] * 3

    place = followed(FOUR, *answer)

    assert place.matched == len(FOUR)


def test_an_empty_prediction_has_no_next_tokens():
    place = followed([], 1, 2, 3)

    assert place.continuation(4) == []
    assert place.matched == len(place) == 0
