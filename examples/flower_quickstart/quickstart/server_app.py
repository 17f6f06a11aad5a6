"""The server's part: Flower's quickstart, with another strategy (marked with <--)."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

from comfedl.flower import RobustStrategy  # <-- in place of flwr.serverapp.strategy's FedAvg
from quickstart.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    torch.manual_seed(0)
    model = Net()
    strategy = RobustStrategy(  # <-- in place of FedAvg(fraction_evaluate=...)
        config["gamma"],
        lr=config["learning-rate"],
        local_steps=config["local-steps"],
        model=model,
        out=config["out"],
        resume=config["resume"],
        fraction_evaluate=config["fraction-evaluate"],
        min_available_nodes=config["min-sites"],
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
        num_rounds=config["num-server-rounds"],
    )
    last = result.evaluate_metrics_clientapp[config["num-server-rounds"]]
    print(f"accuracy: mean {last['eval_acc.mean']:.3f}, worst site {last['eval_acc.worst']:.3f}")
    save_file(result.arrays.to_torch_state_dict(), Path(config["out"]) / "final_model.safetensors")
