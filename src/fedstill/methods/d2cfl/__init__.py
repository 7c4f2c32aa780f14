"""D2C-FL."""

from __future__ import annotations

from fedstill.compose.wrappers import report_only
from fedstill.core.limits import Count, CountOrNone, NotNegative, Share
from fedstill.core.types import Method
from fedstill.local.terms import cross_entropy
from fedstill.methods.d2cfl.migrate import Migration, Restart, StudentShare, StudentStart, migrate
from fedstill.server.aggregate import average
from fedstill.server.distill.student import Student
from fedstill.server.distill.targets import Labels, Rule


def d2cfl(
    *,
    student: Student = Student(steps=None, epochs=5, lr=3e-4, clip=None),
    mix_alpha: Share = 0.2,
    beta: Share = 1.0,
    past: Count = 10,
    warm_up: CountOrNone | None = None,
    threshold: NotNegative = 0.0,
    least: Count = 1,
    rule: Rule = "mean",
    labels: Labels = "soft",
    rollback: Restart = "fresh",
    student_start: StudentStart = "average",
    student_share: StudentShare = "confirmed",
    feedback: bool = False,
) -> Method:
    """D2C-FL: past global models label the server's data, a student learns the labels and is mixed into the average.

        w_g = sum_{k in S} p_k w_k
        rounds 1 .. T:   teacher w'_g = w_g
        afterwards:      q(x) = the mean of the last T teachers' probabilities, kept where its largest is >= tau
                         w_stu <- Adam on mean KL(q(x) || softmax(z(x; w_stu))) over the kept x, from w_g
                         c = part of all x that are kept and whose class in q the average w_g names, too
                         teacher w'_g = (1 - s) w_g + s w_stu,  s = (1 - alpha) c
        w'_g is reported and takes the place of the oldest teacher; clients get w_g; too few labels: w'_g = w_g
        p_k = n_k / sum_{j in S} n_j

    The paper's form: d2cfl(rule="max", labels="hard", threshold=0.75, beta=0.7, student_start="carried",
    student_share="fixed", feedback=true, student.lr=1e-3, student.lr_schedule="constant",
    student.lr_epoch_decay=0.95).

    Helps: where labels are skewed, so that the average changes much from round to round. Where clients are alike it is
        about level with FedAvg, and up to three points below while accuracy rises fast. The paper's form collapses on
        most federations that we tried.

    Args:
        student: how the student learns the kept labels each round; an epoch is a pass over the kept samples.
        mix_alpha: least share of the average in the sent model (alpha, rollback of the teacher); 1 is FedAvg bit for
            bit.
        beta: share of the last student in its next start (beta, rollback of the student); 1 is no rollback.
        past: number of teachers (T), and of rounds of plain averaging in which they are collected.
        warm_up: rounds of the run without labels, in place of `past`; one teacher is enough afterwards.
        threshold: probability from which a label is kept (tau; the paper: 0.75); above 1 is FedAvg.
        least: number of labels below which a round is FedAvg's and no label is learnt.
        rule: "mean", the mean of the teachers' probabilities decides; "max", the surest teacher does (the paper).
        labels: the student learns the "soft" probabilities or the "hard" class (the paper).
        rollback: w_new, a newly initialised model each round ("fresh") or the very first model ("fixed").
        student_start: the model that beta weighs, this round's average ("average") or the last student ("carried", the
            paper).
        student_share: weight s of the student in the sent model: "confirmed", (1 - alpha) c, by which few labels or
            wrong ones cannot take over the model; "fixed", 1 - alpha (the paper).
        feedback: send the teacher to the clients (the paper); false sends them the average and only reports the
            teacher, so that no mistake of a label comes back in the next round's labels.

    Tries: student.lr = 0.0001, 0.0003, 0.001; mix_alpha = 0.1, 0.2, 0.4; past = 5, 10, 20.
    Reveals: the trained model and the number of samples n_k; the server looks at the average only, so secure
        aggregation is possible.
    Differs from the paper: the soft labels of the mean teacher, the student's start, rate and share, and that clients
        get the average, are ours, because the paper's form collapses: there three wrong labels take over 80 % of the
        model. The paper leaves these choices open: probabilities (not logits) are compared with tau; the "most corrupt"
        teacher is the oldest; the first student is the average of round T, rolled back; a round without labels is
        FedAvg's; BatchNorm. A teacher's answers are kept instead of the teacher, which changes nothing.
    Reference: Wang et al., Migrating Federated Learning to Centralized Learning with the Leverage of Unlabeled Data,
        2022, Algorithm 1.
    """
    form = Migration(
        mix_alpha, beta, past, warm_up, threshold, least, rule, labels, rollback, student_start, student_share
    )
    step = migrate(student, form)
    return Method(cross_entropy(), average(), (step if feedback else report_only(step),))
