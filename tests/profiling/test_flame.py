"""Stacks as collapsed lines and as nodes."""

from tunesmith.observe.profiling import flame

LOOKS = [["run", "main", "train", "step"], ["run", "main", "train"], ["run", "main", "train", "step", "loss"]] * 2


def test_frames_that_all_stacks_begin_with_are_left_out_but_for_the_last():
    assert flame.counted([*LOOKS, []]) == {("train", "step"): 2, ("train",): 2, ("train", "step", "loss"): 2}
    assert flame.counted([["a", "b"]]) == {("b",): 1}
    assert flame.counted([]) == {}


def test_collapsed_lines_are_read_back():
    counts = flame.counted([*LOOKS, ["run", "main", "train", "a b (c)"]])
    assert flame.collapsed(counts).splitlines()[0] == "train 2"
    assert flame.parse(flame.collapsed(counts)) == counts


def test_nodes_have_the_share_of_all_stacks_through_them():
    found = {node.stack: (node.share, node.self_share) for node in flame.nodes(flame.counted(LOOKS))}
    assert found == {
        ("train",): (1, 1 / 3),
        ("train", "step"): (2 / 3, 1 / 3),
        ("train", "step", "loss"): (1 / 3, 1 / 3),
    }
    assert [node.stack for node in flame.nodes(flame.counted(LOOKS), 0.5)] == [("train",), ("train", "step")]


def test_a_function_on_a_stack_twice_counts_once():
    counts = flame.counted([["f", "g", "f"], ["g"]])
    assert flame.functions(counts) == [("g", 0.5, 1.0), ("f", 0.5, 0.5)]
