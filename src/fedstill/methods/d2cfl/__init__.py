"""D2C-FL."""

from __future__ import annotations

from fedstill.compose.wrappers import report_only
from fedstill.core.limits import Count, CountOrNone, NotNegative, Share
from fedstill.core.types import Method
from fedstill.local.terms import cross_entropy
from fedstill.methods.d2cfl.migrate import Migration, Restart, StudentStart, migrate
from fedstill.server.aggregate import average
from fedstill.server.distill.student import Student
from fedstill.server.distill.targets import Rule


def d2cfl(
    *,
    student: Student = Student(steps=None, epochs=5, lr_schedule="constant", lr_epoch_decay=0.95, clip=None),
    mix_alpha: Share = 0.2,
    beta: Share = 0.7,
    past: Count = 10,
    warm_up: CountOrNone | None = None,
    threshold: NotNegative = 0.75,
    least: Count = 1,
    rule: Rule = "max",
    rollback: Restart = "fresh",
    student_start: StudentStart = "carried",
    feedback: bool = True,
) -> Method:
    """D2C-FL: past global models label the server's data, a student learns the labels and is mixed into the average.

        w_g = sum_{k in S} p_k w_k
        rounds 1 .. T:   w_stu = w_g,   teacher w'_g = w_g
        afterwards:      y(x) = the class that the surest of the last T teachers names, kept where it is >= tau sure
                         w_stu <- Adam on mean cross-entropy with y from beta w_stu + (1 - beta) w_new
                         teacher w'_g = alpha w_g + (1 - alpha) w_stu
        w'_g is sent to the clients and takes the place of the oldest teacher; too few labels: w_stu = w'_g = w_g
        p_k = n_k / sum_{j in S} n_j

    Args:
        student: how the student learns the kept labels each round; an epoch is a pass over the kept samples.
        mix_alpha: share of the average in the sent model (alpha, rollback of the teacher); 1 is FedAvg bit for bit.
        beta: share of the last student in its next start (beta, rollback of the student); 1 is no rollback.
        past: number of teachers (T), and of rounds of plain averaging in which they are collected.
        warm_up: rounds of the run without labels, in place of `past`; one teacher is enough afterwards.
        threshold: probability from which a label is kept (tau); above 1 is FedAvg.
        least: number of labels below which a round is FedAvg's and no label is learnt.
        rule: "max", the surest teacher decides; "mean", the mean of the teachers' probabilities does.
        rollback: w_new, a newly initialised model each round ("fresh") or the very first model ("fixed").
        student_start: the model that beta weighs, the last student ("carried") or this round's average ("average").
        feedback: send the teacher to the clients; false sends them the average and only reports the teacher.

    Reveals: the trained model and the number of samples n_k; the server looks at the average only, so secure
        aggregation is possible.
    Differs from the paper: these choices are ours, because the paper leaves them open: probabilities (not logits) are
        compared with tau; the "most corrupt" teacher is the oldest; the first student is the average of round T, rolled
        back; a round without labels is FedAvg's; BatchNorm. A teacher's answers are kept instead of the teacher, which
        changes nothing.
    Reference: Wang et al., Migrating Federated Learning to Centralized Learning with the Leverage of Unlabeled Data,
        2022, Algorithm 1.
    """
    step = migrate(student, Migration(mix_alpha, beta, past, warm_up, threshold, least, rule, rollback, student_start))
    return Method(cross_entropy(), average(), (step if feedback else report_only(step),))
