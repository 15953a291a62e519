"""The two diagrams of docs/architecture.md: a penalised step, and ``seht compare``."""

from diagram import AMBER, BLUE, GREEN, MUTED, Diagram


def penalised_step() -> None:
    d = Diagram(860, 610, "The way of the data through a penalised step")
    d.box(20, 20, 250, 64, "your loop", "loss = penalty(closure)", "loss.backward()", fill=AMBER)
    d.box(
        20, 130, 250, 98, "penalty.py", "step and call are counted",
        "strength/ says how much: the weight,", "or that this step is plain",
        "distributed/ says who trains with us", fill=BLUE,
    )  # fmt: skip
    d.box(
        20, 274, 250, 81, "task.py", "model, closure, chosen tensors, probes,",
        "curvature, boundary, weight, limit:", "all that one estimate is of", fill=BLUE,
    )  # fmt: skip
    d.box(
        20, 401, 250, 98, "engines/", "difference, gauss_newton, autograd",
        "form, precision, prefix, checks are", "settled before the first pass;",
        "step_size.py says how far to go", fill=BLUE,
    )  # fmt: skip
    d.box(
        330, 401, 240, 98, "replay/  at the centre w", "runs your closure once",
        "records decisions: sides of a ReLU,", "maxima, comparisons, random draws",
        "keeps the graph, or its gradient", fill=GREEN,
    )  # fmt: skip
    d.box(
        600, 401, 240, 98, "replay/  at w ± e s", "runs it again, at moved weights",
        "with the recorded decisions", "differentiates at once: g(w+), g(w-)",
        "puts weights and buffers back", fill=GREEN,
    )  # fmt: skip
    d.box(
        330, 130, 240, 81, "operators/", "one row for each PyTorch function:",
        "how its decision is frozen, where the", "examples go, whether it is affine",
    )  # fmt: skip
    d.box(600, 130, 240, 64, "persample/", "SEHT-S: a direction for every", "example of the batch")
    d.box(600, 214, 240, 47, "precision/", "float32 passes, whatever the user's")
    d.box(600, 281, 240, 64, "curvature/", "Gauss-Newton: where outputs are,", "and the loss in them")  # fmt: skip
    d.box(330, 281, 240, 64, "tensors/", "graphs, views, random states, undo;", "every change of the process")  # fmt: skip
    d.box(
        330, 530, 510, 64, "Estimate", "trace = s · (g(w+) − g(w−)) / 2e",
        "its gradient = (g(w+) + g(w−) − 2 g(w)) / e², handed out in your backward()", fill=BLUE,
    )  # fmt: skip
    d.arrow((145, 84), (145, 130), words="closure")
    d.arrow((145, 228), (145, 274), words="weight > 0: a Task")
    d.arrow((145, 355), (145, 401), words="estimate(task, ranks)")
    d.arrow((270, 450), (330, 450))
    d.arrow((570, 450), (600, 450))
    d.arrow((720, 499), (720, 530))
    d.arrow((450, 499), (450, 530))
    d.arrow((330, 562), (8, 562), (8, 52), (20, 52))
    d.text(24, 555, "loss + weight · trace, one scalar", 12, MUTED)
    d.text(330, 112, "what the passes ask while your closure runs", 12, MUTED)
    d.arrow((585, 345), (585, 392), dashed=True)
    d.save("penalised-step.svg")


def comparison() -> None:
    d = Diagram(860, 500, "The way of the data through seht compare")
    d.box(20, 20, 250, 81, "seht compare digits", "--methods, --seeds, --grid, any field",
          "lab/commands/: a mistake is said now,", "in one line", fill=AMBER)  # fmt: skip
    d.box(20, 145, 250, 98, "Comparison", "recipes/ and methods/ by their names",
          "one Entry a row, the first the baseline", "every method is built once, so that",
          "what does not fit is said at once", fill=BLUE)  # fmt: skip
    d.box(20, 287, 250, 64, "search.py  (with --grid)", "candidates on the validation split,",
          "with seeds that never judge", fill=BLUE)  # fmt: skip
    d.box(20, 395, 250, 81, "Trial", "recipe, method, seed, directory:", "plain data; what is done",
          "is skipped", fill=BLUE)  # fmt: skip
    d.box(320, 395, 240, 81, "schedulers/", "in turn, in processes (--jobs),",
          "or as Ray tasks: what dies is", "started again", fill=GREEN)  # fmt: skip
    d.box(610, 287, 230, 189, "runner.py, training.py", "data/, models/, optimizers",
          "a step: method.batch, closure,", "method.term, method.objective,", "backward, optimiser",
          "checkpoint.pt while it runs", "evaluate, robustness, spectrum:",
          "the test set is read once,", "at the end", fill=GREEN)  # fmt: skip
    d.box(610, 145, 230, 98, "records.py", "config.json, metrics.csv, model.pt,",
          "result.json last: done or failed", "each file written beside its name,",
          "then moved there")  # fmt: skip
    d.box(320, 145, 240, 98, "cost.py, report/", "a step's time, beside the baseline's",
          "rows: paired differences, Holm", "columns: what a table shows",
          "table.md, table.csv, report.html", fill=BLUE)  # fmt: skip
    d.arrow((145, 101), (145, 145))
    d.arrow((145, 243), (145, 287))
    d.arrow((145, 351), (145, 395))
    d.arrow((270, 435), (320, 435))
    d.arrow((560, 435), (610, 435))
    d.arrow((725, 287), (725, 243))
    d.arrow((610, 194), (560, 194))
    d.arrow((440, 145), (440, 60), (270, 60))
    d.text(320, 50, "table on the terminal, page on disk", 12, MUTED)
    d.save("compare.svg")


if __name__ == "__main__":
    penalised_step()
    comparison()
