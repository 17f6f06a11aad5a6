"""A site's part: Flower's quickstart, and one more metric, the loss of the received model (marked with <--)."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart.task import Net, load_data, test as test_fn, train as train_fn

app = ClientApp()


def prepare(msg: Message, context: Context):
    """The model that came, and this site's data."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    node = context.node_config
    return model, *load_data(node["partition-id"], node["num-partitions"], context.run_config["batch-size"])


@app.train()
def train(msg: Message, context: Context) -> Message:
    model, trainloader, _ = prepare(msg, context)
    loss, _ = test_fn(model, trainloader)  # <-- before training
    train_loss = train_fn(model, trainloader, context.run_config["local-steps"], msg.content["config"]["lr"])
    metrics = {
        "loss": loss,  # <--
        "train_loss": train_loss,
        "num-examples": len(trainloader.dataset),
    }
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    model, _, testloader = prepare(msg, context)
    loss, accuracy = test_fn(model, testloader)
    metrics = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(testloader.dataset)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
