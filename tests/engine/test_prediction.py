"""An answer is followed through its prediction, forwards only."""

from disagg.engine.prediction import FollowedPrediction


def followed(prediction, *answer):
    place = FollowedPrediction(prediction)
    place.follow(answer)
    return place


def test_an_answer_is_expected_to_begin_as_its_prediction():
    assert followed([5, 6, 7, 8]).continuation(3) == [5, 6, 7]


def test_a_place_behind_the_answer_so_far_is_next():
    place = followed([5, 6, 7, 8], 5, 6)

    assert place.continuation(9) == [7, 8]
    assert place.matched == 2


def test_nothing_is_expected_behind_a_token_that_was_not_predicted():
    assert followed([5, 6, 7, 8], 5, 1).continuation(2) == []


def test_three_tokens_further_on_find_the_place_again():
    place = followed([*range(20)], 0, 1, 99, 5, 6, 7)

    assert place.continuation(2) == [8, 9]
    assert place.matched == 5


def test_a_passage_counts_once_however_often_it_is_repeated():
    place = followed([5, 6, 7], 5, 6, 7, 5, 6, 7, 5, 6, 7)

    assert place.matched == 3


def test_an_empty_prediction_has_no_tokens_that_match():
    place = followed([], 1, 2, 3)

    assert (len(place), place.matched, place.continuation(4)) == (0, 0, [])
