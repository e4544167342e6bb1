from tests.fuzz.case import Case
from tests.fuzz.judge import judge

if __name__ == "__main__":
    v = judge(
        Case(
            backend="xla",
            composition="zero1 x 2",
            optimizer="AdamW",
            freeze_at=1,
            keep_zeros=True,
            samples=32,
            drop_last=True,
        ),
        seconds=60,
    )
    print(v.kind, v.seconds, v.case.describe(), v.detail[:2500], flush=True)
