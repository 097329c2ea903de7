"""Which messages travel in which direction: one closed union each, so a `match` can be proved complete."""

from typing import TypeAlias

from pannier.wire import messages as m

WorkerToGateway: TypeAlias = m.Hello | m.Heartbeat | m.Goodbye
GatewayToWorker: TypeAlias = m.Welcome | m.Refused | m.Heartbeat | m.Goodbye

WorkerToGatewayData: TypeAlias = (
    m.Join | m.Ready | m.StepDone | m.StageDone | m.NeedState | m.StepFailed | m.StepAborted | m.LinkLost | m.Fenced
)
GatewayToWorkerData: TypeAlias = m.AttentionAssign | m.ComputeAssign | m.Step | m.AbortStep | m.Fence | m.NewSession

ComputeToAttention: TypeAlias = m.BeginStep | m.Piece | m.EndStep | m.AbortStep
AttentionToCompute: TypeAlias = m.Answer | m.PieceWritten | m.StepWritten | m.StepAborted | m.StepFailed

StageToStage: TypeAlias = m.Activations | m.DrawnTokens

ClientToGateway: TypeAlias = m.Generate | m.Cancel | m.GetStatus | m.Tokenize | m.Detokenize
GatewayToClient: TypeAlias = m.Delta | m.Failed | m.Status | m.Tokens | m.TokenText
