"""A run under secure aggregation: the server learns sums over the sites, and the worst-off site still gets its weight.

For anyone whose sites must not show the server their updates or losses. Each site masks what it sends; the masks cancel
in the sum over all sites. Needs: pip install 'comfedl[secure]'. Expect the same accuracy as without masks, for FedAvg
and for the weights of KL, and no difference where a third of the sites drop out after masking. The server does not
learn which site is worst; here all data are on one machine, so that the script can look.
"""

import comfedl as cf

KL = cf.ComFedL(lr=0.1, outer=cf.KL(gamma=0.1), server_optimizer=cf.optim.SGD(momentum=0.9))


def main() -> None:
    fed = cf.load("digits", cf.partition.Dirichlet(clients=9, alpha=0.3), seed=0)

    def train(method: cf.ComFedL | cf.FedAvg, **more: object) -> cf.Result:
        model = cf.models.build("logistic", (1, 8, 8), classes=10, seed=0)
        return cf.fit(model, fed, method, rounds=20, eval_every=20, **more)

    def difference(one: cf.Result, other: cf.Result) -> float:
        return max(float((one.params[name] - part).abs().max()) for name, part in other.params.items())

    secure = cf.SecureAggregation(threshold=2 / 3)
    for name, method in (("FedAvg", cf.FedAvg(lr=0.1)), ("KL", KL)):
        plain, hidden = train(method), train(method, secure=secure)
        same = "the same model" if difference(plain, hidden) < 1e-5 else "another model"
        known = [key for key in hidden.rounds[-1] if key.startswith("validation.accuracy")]
        print(f"{name:6} mean accuracy {hidden.rounds[-1]['validation.accuracy.mean']:.3f}, {same} as without masks")
    print(f"of the accuracy the server knows: {', '.join(known)}")

    third = ["client-1", "client-4", "client-7"]
    left = train(KL, secure=secure, faults=[cf.faults.LeaveEarly(1.0, third)])
    print(f"a third leave after masking: the same model: {difference(left, hidden) == 0}")
    try:
        train(KL, secure=secure, faults=[cf.faults.LeaveEarly(1.0, [*third, "client-0"])])
    except cf.QuorumError as error:
        print(f"four leave: {error}")
    try:
        train(cf.FedAvg(aggregate="median"), secure=secure)
    except cf.ConfigError as error:
        print(f"a median: {error}")


if __name__ == "__main__":
    main()
